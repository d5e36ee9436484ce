"""A run with data.order: file sees the records in the order of its files, also where it is resumed."""

import io
import json
import shutil
from pathlib import Path

import surefoot
from helpers.tiny_models import tiny_llama
from surefoot.report.verification import compare_folders

ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 7)]


def train(place: Path, folder: Path, *, resume: bool = False, **data) -> list[int]:
    config = {
        "stage": "sft",
        "model": str(place / "m"),
        "data": {"train": str(place / "rows.json"), **data},
        "precision": "fp32",
        "batch": {"size": 2},
        "duration": "6 steps",
        "checkpoint": {"every": "2 steps"},
        "output": str(folder),
    }
    said = io.StringIO()
    assert surefoot.train(config, stream=said, resume=resume).finished, said.getvalue()
    rows = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    return [row["supervised_tokens"] for row in rows if "supervised_tokens" in row]


def test_examples_come_as_they_stand(tmp_path):
    tiny_llama(tmp_path / "m")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    tokens = train(tmp_path, tmp_path / "run", order="file")
    assert tokens[:3] == sorted(tokens[:3])  # longer answers come later
    assert len(set(tokens[:3])) == 3
    assert tokens[3:] == tokens[:3]
    shuffled = train(tmp_path, tmp_path / "shuffled")  # twin
    assert shuffled[3:] != shuffled[:3]
    killed = Path(shutil.copytree(tmp_path / "run", tmp_path / "killed"))
    shutil.rmtree(killed / "checkpoint-6")
    (killed / "MANIFEST.json").unlink()
    train(tmp_path, killed, resume=True, order="file")
    assert compare_folders(tmp_path / "run", killed) == []
