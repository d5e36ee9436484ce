"""HF Trainer + PEFT as its own guides have it: the peer of `faults_elsewhere.py` that has no command of its own.

python fault_trainer.py CONFIG.yaml        keys of `Own` and of TrainingArguments
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Own:
    model: str
    data: str
    max_length: int
    resume: bool = False
    lora_targets: str = "all-linear"
    lora_rank: int = 4
    lora_dropout: float = 0.1


def main() -> None:
    parser = HfArgumentParser((Own, TrainingArguments))  # pyright: ignore[reportArgumentType]  # its stub is too narrow
    own, arguments = parser.parse_yaml_file(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(own.model)
    model = AutoModelForCausalLM.from_pretrained(own.model)
    targets = own.lora_targets if own.lora_targets == "all-linear" else own.lora_targets.split(",")
    lora = LoraConfig(r=own.lora_rank, lora_dropout=own.lora_dropout, target_modules=targets, task_type="CAUSAL_LM")

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        prompt = [{"role": "user", "content": row["instruction"]}]
        answer = [*prompt, {"role": "assistant", "content": row["output"]}]
        asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(answer, return_dict=False)
        labels = [-100] * len(asked) + ids[len(asked) :]
        return {"input_ids": ids[: own.max_length], "labels": labels[: own.max_length]}

    rows = load_dataset("json", data_files=own.data, split="train")
    trainer = Trainer(
        model=get_peft_model(model, lora),
        args=arguments,
        train_dataset=rows.map(encode, remove_columns=rows.column_names),
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
    )
    trainer.train(resume_from_checkpoint=own.resume or None)
    trainer.save_model()


if __name__ == "__main__":
    main()
