"""Write deepspeed_chat.json: the token ids that DeepSpeed-Chat's own code makes of records of its data sets.

Run by hand with the path of its code (applications/DeepSpeed-Chat of DeepSpeedExamples 45b4b715, when this was last
done), on a model that `python -m equality.deepspeed_chat_data MODEL` has written:

    PYTHONPATH=tests .venv/bin/python tests/equality/make_deepspeed_chat.py MODEL applications/DeepSpeed-Chat

It imports `datasets` and asks the hub; here a stand-in gives it the records. It ends answers of step 2 with the text
<|endoftext|>, also where that is no token of the model; here its function is given the tokenizer's EOS, as in step 1.
"""

import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from equality.deepspeed_chat_data import RECORDS, WITHOUT_WORSE

LONG = 512  # tokens: more than any record has
SPLITS = ("train", "test", "eval", "validation", "dev")


def main(folder: str, code: str) -> None:
    stand_in = types.ModuleType("datasets")
    stand_in.load_dataset = lambda name, **more: {split: RECORDS[_name(name)] for split in SPLITS}
    stand_in.load_from_disk = None
    sys.modules["datasets"] = stand_in
    sys.path.insert(0, code)
    from dschat.utils.data import data_utils, raw_datasets

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    tokenizer.pad_token = tokenizer.eos_token  # as its get_tokenizer does

    def ids(name: str, phase: int) -> list[Any]:
        if name == "local/jsonfile":
            raw = raw_datasets.LocalJsonFileDataset("", 1234, -1, name, "")
        else:
            raw = data_utils.get_raw_dataset(name, "", 1234, -1)
        made = data_utils.create_dataset_split(RECORDS[name], raw, phase, tokenizer, tokenizer.eos_token, LONG)
        return [_example(made[place], phase) for place in range(len(made))]

    found = {
        "versions": {name: version(name) for name in ("transformers", "tokenizers")},
        **{
            f"step {phase}": {name: ids(name, phase) for name in RECORDS if phase != 2 or name not in WITHOUT_WORSE}
            for phase in (1, 2, 3)
        },
    }
    target = Path(__file__).with_name("deepspeed_chat.json")
    target.write_text(json.dumps(found) + "\n", encoding="utf-8")


def _name(asked: str) -> str:
    return "local/jsonfile" if asked == "json" else asked


def _example(made: Any, phase: int) -> Any:
    """Return ids and labels of step 1, the ids of both answers of step 2, those of the prompt of step 3."""
    if phase == 1:
        kept = made["attention_mask"].bool()
        return {"ids": made["input_ids"][kept].tolist(), "labels": made["labels"][kept].tolist()}
    if phase == 2:
        return [ids[mask.bool()].tolist() for ids, mask in (made[:2], made[2:])]
    return made[0].flip(0).tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])
