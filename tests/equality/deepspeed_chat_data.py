"""Records in the columns of DeepSpeed-Chat's data sets, written for these tests. `python -m
equality.deepspeed_chat_data FOLDER` writes the model that both sides use."""

import sys
from pathlib import Path
from typing import Any

_OPEN = "\n\nHuman: Where is Bergen?\n\nAssistant: In Norway.\n\nHuman:  And Cusco?\n\nAssistant:"
RECORDS: dict[str, list[dict[str, Any]]] = {
    "Dahoas/rm-static": [
        {"prompt": "\n\nHuman: What is a fjord?\n\nAssistant:", "response": " x", "chosen": " An inlet of the sea.",
         "rejected": " A bird."},
        {"prompt": _OPEN, "response": "", "chosen": " In Peru.", "rejected": "  I do not know.\n"},
    ],
    "Dahoas/full-hh-rlhf": [
        {"prompt": _OPEN, "response": "", "chosen": " Peru, in the Andes.", "rejected": " Human: Ask again."},
    ],
    "Dahoas/synthetic-instruct-gptj-pairwise": [
        {"prompt": "Name a bird.", "chosen": "Heron.", "rejected": "Trout."},
        {"prompt": "Sort: 3, 1, 2\nOne a line.", "chosen": "1\n2\n3 – as you see", "rejected": " 3 2 1 "},
    ],
    "yitingxie/rlhf-reward-datasets": [
        {"prompt": "\n\nHuman: Where is Oslo?\n\n", "chosen": "Assistant: In Norway.", "rejected": "Assistant: Far."},
        {"prompt": "\n\nHuman: Hi!\n\nAssistant: Hello.\n\nHuman: What is 2 {{+}} 2?\n\n", "chosen": "Assistant: 4",
         "rejected": "Assistant: 5"},
    ],
    "wangrui6/Zhihu-KOL": [
        {"INSTRUCTION": "怎么说明白?", "RESPONSE": "慢慢说。\n再说一次。", "SOURCE": "Zhihu", "METADATA": "{}"},
    ],
    "Cohere/miracl-zh-queries-22-12": [
        {"query_id": "1", "query": "峡湾是什么?", "emb": [0.5],
         "positive_passages": [{"docid": "1", "title": "峡湾", "text": "海的入口。"}],
         "negative_passages": [{"docid": "2", "title": "鸟", "text": "一只鸟。"}]},
    ],
    "local/jsonfile": [
        {"prompt": "What is a fjord?", "chosen": "An inlet.", "rejected": "A bird."},
        {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": " Hello.", "rejected": "Go away."},
    ],
}  # fmt: skip
WITHOUT_WORSE = ("wangrui6/Zhihu-KOL",)

if __name__ == "__main__":
    from helpers.tiny_models import tiny_llama

    tiny_llama(Path(sys.argv[1]), pad=True)
