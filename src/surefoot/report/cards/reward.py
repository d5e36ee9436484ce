"""The code of a reward model's card: it scores one answer with nothing but transformers, PEFT and safetensors."""

from __future__ import annotations

import json
from collections.abc import Sequence


def scoring_lines(question: str, end: str) -> list[str]:
    """end: the token that ended every answer in training, at which the score is read. The prompt and the answer are
    encoded apart, as they were in training."""
    return [
        "import torch",
        "from huggingface_hub import snapshot_download",
        "from pathlib import Path",
        "from safetensors.torch import load_file\n",
        "place = Path(folder) if Path(folder).is_dir() else Path(snapshot_download(folder))",
        'head = load_file(place / "value_head.safetensors")',
        f'messages = [{{"role": "user", "content": {json.dumps(question, ensure_ascii=False)}}}]',
        f'answer = "Sleep, move and eat well."{f" + {json.dumps(end, ensure_ascii=False)}" if end else ""}',
        "prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids",
        "ids = torch.tensor([prompt + tokenizer(answer, add_special_tokens=False).input_ids])",
        "with torch.no_grad():",
        "    hidden = model.eval().get_decoder()(input_ids=ids).last_hidden_state[0, -1].float()",
        '    score = hidden @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"][0]',
        "print(float(score))  # of two answers to one prompt, the better one has the higher score",
    ]


def ending_token(ids: Sequence[int], stop_ids: Sequence[int]) -> int | None:
    """What ends an example, where that is a stop token."""
    return int(ids[-1]) if len(ids) and ids[-1] in stop_ids else None
