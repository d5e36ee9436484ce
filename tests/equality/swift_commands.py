"""Commands of ms-swift that it and surefoot are both given, and the tiny models that they name.

Its template for a model follows from the folder's name. `python -m equality.swift_commands MODELS` writes the models.
"""

import shlex
import sys
from pathlib import Path

from helpers import zoo

HERE = Path(__file__).parent
DATA = HERE / "swift_data"
MODELS = {
    "Qwen2-0.5B-Instruct": zoo.qwen2,
    "Qwen2.5-0.5B-Instruct": zoo.qwen2,
    "Qwen3-0.6B": zoo.qwen3,
    "Qwen3-4B-Instruct-2507": zoo.qwen3,
    "Meta-Llama-3.1-8B-Instruct": zoo.llama3,
}
_FULL = "--tuner_type full --gradient_accumulation_steps 1 --per_device_train_batch_size"
_PAIRS = '--columns \'{"ask": "query", "good": "response", "bad": "rejected_response"}\''
# The model's folder and the data's file are named without theirs.
COMMANDS = {
    "queries": f"sft --model Qwen2.5-0.5B-Instruct --dataset queries.jsonl --max_length 128 {_FULL} 6",
    "old-system": f"sft --model Qwen2-0.5B-Instruct --dataset queries.jsonl --system Quick {_FULL} 6 "
    "--num_train_epochs 4 --lr_scheduler_type linear --warmup_steps 2 --learning_rate 2e-4",
    "messages-lora": "sft --model Qwen3-0.6B --dataset messages.jsonl --lora_dropout 0 --num_train_epochs 5 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --warmup_ratio 0.3",
    "last-round": f"sft --model Qwen2.5-0.5B-Instruct --dataset messages.jsonl --loss_scale last_round {_FULL} 4 "
    "--num_train_epochs 2 --lr_scheduler_type constant_with_warmup --warmup_ratio 0.5",
    "marked": f"sft --model Qwen2.5-0.5B-Instruct --dataset marked.jsonl {_FULL} 3",
    "all-tokens": f"sft --model Qwen3-0.6B --dataset messages.jsonl --loss_scale all {_FULL} 4",
    "last-thought": f"sft --model Qwen3-0.6B --dataset messages.jsonl --loss_scale last_round {_FULL} 4",
    "alpaca": f"sft --model Qwen3-4B-Instruct-2507 --dataset records.json --system 'Be brief.' {_FULL} 12 "
    "--max_steps 3 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr\": 1e-6}'",
    "sharegpt": f"sft --model Qwen2.5-0.5B-Instruct --dataset dialogues.json {_FULL} 2",
    "cut": f"sft --model Qwen2.5-0.5B-Instruct --dataset messages.jsonl --max_length 60 --truncation_strategy right "
    f"{_FULL} 4",
    "raw": f"sft --model Qwen2.5-0.5B-Instruct --dataset queries.jsonl --use_chat_template false {_FULL} 6",
    "texts": f"pt --model Qwen2.5-0.5B-Instruct --dataset texts.jsonl {_FULL} 4 --learning_rate 1e-5 "
    "--num_train_epochs 2",
    "llama-texts": f"pt --model Meta-Llama-3.1-8B-Instruct --dataset lone.jsonl {_FULL} 4",
    "dpo": f"rlhf --rlhf_type dpo --model Qwen2.5-0.5B-Instruct --dataset pairs.jsonl {_PAIRS} {_FULL} 4 "
    "--num_train_epochs 2",
    "dpo-messages": f"rlhf --rlhf_type dpo --model Qwen2.5-0.5B-Instruct --dataset preferred.jsonl {_FULL} 4",
    "orpo": f"rlhf --rlhf_type orpo --model Qwen3-0.6B --dataset pairs.jsonl {_PAIRS} {_FULL} 4",
    "simpo": f"rlhf --rlhf_type simpo --model Qwen2.5-0.5B-Instruct --dataset pairs.jsonl {_PAIRS} {_FULL} 4",
    "kto": f"rlhf --rlhf_type kto --model Qwen2.5-0.5B-Instruct --dataset judged.jsonl {_FULL} 4",
    "reward": f"rlhf --rlhf_type rm --model Qwen2.5-0.5B-Instruct --dataset pairs.jsonl {_PAIRS} {_FULL} 4",
}  # fmt: skip


def words_of(name: str, models: Path, output: Path) -> list[str]:
    """The command's words behind `swift`, with places."""
    words = shlex.split(COMMANDS[name])
    for setting, folder in (("--model", models), ("--dataset", None)):
        place = words.index(setting) + 1
        where = folder or (DATA if words[place].endswith(".jsonl") else HERE)
        words[place] = str(where / words[place])
    return [*words, "--output_dir", str(output)]


if __name__ == "__main__":
    for model, build in MODELS.items():
        build(Path(sys.argv[1]) / model)
