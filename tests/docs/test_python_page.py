"""docs/python.md: every Python block runs as it stands, in a folder that has what it names."""

import json
import shutil

import pytest
import yaml

from helpers.doc_pages import ROOT, blocks
from helpers.tiny_models import tiny_llama
from surefoot.system.errors import InputError

PAGE = ROOT / "docs" / "python.md"
BLOCKS = [block for block in blocks("python") if block.page == PAGE]
ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 17)]
QUIZ = [{"question": f"What is {n} + 1?", "choices": ["0", str(n + 1)], "answer": 1} for n in range(8)]
CONFIG = {
    "stage": "sft",
    "model": "models/base",
    "adapter": {"kind": "lora", "rank": 4},
    "data": {"train": "data/train.jsonl"},
    "batch": {"size": 4},
    "duration": "4 steps",
    "output": "runs/my-run",
}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python-page")
    tiny_llama(folder / "models" / "base")
    (folder / "data").mkdir()
    for name, rows in (("train", ROWS), ("quiz", QUIZ)):
        (folder / "data" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "my-run.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


@pytest.fixture
def workplace(furnished, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(furnished, tmp_path / "place"))


def run(source):
    exec(compile(source, str(PAGE), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_quoted_block_runs(workplace, block, capsys):
    run(block.text)
    if "except InputError" in block.text:
        promised = block.text.split("print(error)  # ")[1].strip()
        assert promised in capsys.readouterr().out


def test_the_page_is_not_empty():
    assert len(BLOCKS) >= 7


def test_twin_a_wrong_name_in_a_block_is_seen(workplace):
    block = next(block for block in BLOCKS if "def shared_words" in block.text)
    with pytest.raises(InputError, match="'shared_words'"):
        run(block.text.replace('{"shared_words": shared_words}', '{"other": shared_words}'))
