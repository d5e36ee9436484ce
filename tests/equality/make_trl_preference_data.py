"""Write trl_preference_data.json: the token ids that TRL's DPOTrainer and KTOTrainer make of real records.

Run by hand, with the interpreter of an environment that has TRL (1.16 when this was last done, with surefoot's versions
of tokenizers and transformers), on a model written by surefoot's environment:

    PYTHONPATH=tests .venv/bin/python -m equality.preference_data MODEL
    PYTHONPATH=tests OTHER/bin/python tests/equality/make_trl_preference_data.py MODEL
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from equality.preference_data import digest, judged, pairs

QUIET = {"report_to": "none", "use_cpu": True, "bf16": False, "max_length": None}


def main(folder: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as out:
        dpo = DPOTrainer(
            model, args=DPOConfig(out, **QUIET), train_dataset=Dataset.from_list(pairs()), processing_class=tokenizer
        )
        kto = KTOTrainer(
            model,
            args=KTOConfig(out, per_device_train_batch_size=2, **QUIET),
            train_dataset=Dataset.from_list(judged()),
            processing_class=tokenizer,
        )
    found = {
        "versions": {name: version(name) for name in ("trl", "transformers", "tokenizers")},
        "dpo": [digest(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in dpo.train_dataset],
        "kto": [[digest(row["prompt_ids"], row["completion_ids"]), row["label"]] for row in kto.train_dataset],
    }
    target = Path(__file__).with_name("trl_preference_data.json")
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
