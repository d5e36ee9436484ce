"""A translated config of LLaMA-Factory for a Qwen-VL trains on its tokens: each slot of a template is tokenized alone,
and a mark of a picture is first written as the picture's tokens."""

import json

import pytest
import yaml
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from equality.ours import run_until_step_1
from equality.picture_models import write_models, write_pictures
from surefoot.commands.translate import reading_options
from surefoot.interop.registry import translate_file

IGNORED = -100
THOUGHT = "<think>\n\n</think>\n\n"
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
ASKED = ["<image>What is this?", "Is it <image> or <image>?", "And without one?"]
SHOWN = [["grain.png"], ["sand.png", "snow.png"], []]
# template -> model, text before the first turn, text before an answer
TEMPLATES = {
    "qwen2_vl": ("qwen2_5_vl", SYSTEM, ""),
    "qwen3_vl": ("qwen3_vl", "", THOUGHT),
    "qwen3_vl_nothink": ("qwen3_vl", "", ""),
    "qwen3_5_nothink": ("qwen3_5", "", ""),
}


def theirs(folder, before, thought):
    """Ids and labels, as its template and its plugin for pictures compute them."""
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    found = []
    for text, shown in zip(ASKED, SHOWN, strict=True):
        for name in shown:
            picture = Image.open(folder.parent.parent / "pictures" / name)
            grid = processor(images=[picture], return_tensors="pt")["image_grid_thw"][0]
            count = int(grid.prod()) // processor.merge_size**2
            text = text.replace("<image>", f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>", 1)
        slots = [
            (before, False),
            (f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", False),
            (thought, True),
            ("noise<|im_end|>\n", True),
        ]
        row = {"ids": [], "labels": []}
        for written, learned in slots:
            ids = tokenizer.encode(written, add_special_tokens=False)
            row["ids"] += ids
            row["labels"] += ids if learned else [IGNORED] * len(ids)
        found.append(row)
    return found


@pytest.fixture(params=list(TEMPLATES))
def case(request, tmp_path):
    name, before, thought = TEMPLATES[request.param]
    write_pictures(tmp_path / "pictures")
    write_models(tmp_path / name, name)
    rows = [
        {
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "noise"}],
            "images": [f"pictures/{one}" for one in shown],
        }
        for text, shown in zip(ASKED, SHOWN, strict=True)
    ]
    (tmp_path / "seen.json").write_text(json.dumps(rows))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    described = {"file_name": "seen.json", "formatting": "sharegpt", "tags": tags}
    described["columns"] = {"messages": "messages", "images": "images"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"seen": described}))
    given = {
        "model_name_or_path": str(tmp_path / name / "policy"),
        "template": request.param,
        "dataset": "seen",
        "dataset_dir": str(tmp_path),
        "do_train": True,
        "lora_target": "all",
        "output_dir": str(tmp_path / "out"),
    }
    found = translate_file("run.yaml", yaml.safe_dump(given), [], reading_options())
    return json.loads(json.dumps(found.config)), theirs(tmp_path / name / "policy", before, thought)


def test_ids_and_labels(case):
    config, expected = case
    assert config["data"]["max_pixels"] == 768 * 768
    ours = sorted(run_until_step_1(config, step=False).examples, key=str)
    assert ours == sorted(expected, key=str)
    thinks = config["data"]["template"].endswith("qwen3")
    config["data"]["template"] = "llamafactory-qwen3_nothink" if thinks else "llamafactory-qwen3"
    assert sorted(run_until_step_1(config, step=False).examples, key=str) != sorted(expected, key=str)  # the twin
