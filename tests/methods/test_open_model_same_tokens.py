"""An adapter is put over a base in which its token ids mean the same, or one line says which one does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from helpers import zoo
from helpers.adapter_runs import a_run
from helpers.faults import raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.families.bos_zero import BOS_FILE, bos_file
from surefoot.methods import open_model
from surefoot.methods.open_model import find_parts

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def with_tokenizer(run: Path, source: Path) -> Path:
    """The run as training leaves it, its tokenizer beside it."""
    for name in TOKENIZER:
        shutil.copy(source / name, run / name)
    return run


def edited(run: Path, old: str, new: str) -> Path:
    """A token has another name."""
    for name in TOKENIZER:
        (run / name).write_text((run / name).read_text().replace(old, new))
    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("same") / "base")


@pytest.fixture
def run(base, tmp_path) -> Path:
    return with_tokenizer(a_run(tmp_path / "run", base), base)


def phi3_over_llama(tmp_path: Path) -> list[str]:
    """An adapter with Phi-3's tokens and a scaled BOS, over a Llama whose tokens are others, with rows enough."""
    phi3, llama = zoo.phi3(tmp_path / "phi3"), tiny_llama(tmp_path / "llama", spare_rows=300)
    run = with_tokenizer(a_run(tmp_path / "phi3-run", llama), phi3)
    (run / BOS_FILE).write_text(json.dumps(bos_file(0.1)))
    return ["export", str(llama), "--adapter", str(run), "--merge", "--out", str(tmp_path / "out")]


def test_an_adapter_of_another_tokenizer_is_refused(tmp_path):
    shown = CliRunner().invoke(main, phi3_over_llama(tmp_path))
    assert (shown.exit_code, len(shown.stderr.splitlines())) == (2, 1)
    assert str(tmp_path / "phi3-run") in shown.stderr
    assert not (tmp_path / "out").exists()


def test_twin_without_the_check_the_tokenizer_is_swapped(tmp_path, monkeypatch):
    monkeypatch.setattr(open_model, "require_same_tokens", lambda *_: None)
    shown = CliRunner().invoke(main, phi3_over_llama(tmp_path))
    assert shown.exit_code == 0, shown.stderr
    written, phi3 = (tmp_path / name / "tokenizer.json" for name in ("out", "phi3"))
    assert written.read_bytes() == phi3.read_bytes()


@pytest.mark.parametrize("token", ['"~":', "<|eot_id|>", "<|begin_of_text|>"])
def test_a_token_that_training_wrote_has_the_same_id(base, run, token):
    with raises_fault("SF-TOKENIZER", run):
        find_parts(str(base), str(edited(run, token, token.replace("~", "another one").replace("|", "!"))))


def test_files_that_differ_and_mean_the_same_are_accepted(base, run):
    """Saved anew by transformers; a reserved token, which no text holds, with another name."""
    AutoTokenizer.from_pretrained(base).save_pretrained(run)
    edited(run, "<|reserved_special_token_1|>", "<|python_tag|>")
    assert (run / "tokenizer.json").read_bytes() != (base / "tokenizer.json").read_bytes()
    assert find_parts(str(base), str(run))[0] == base


@pytest.mark.parametrize("brings_rows", [True, False])
def test_tokens_behind_the_base_s_rows_come_with_their_rows(base, tmp_path, brings_rows):
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = len(tokenizer)
    run = with_tokenizer(a_run(tmp_path / "run", base, rows=rows + 1 if brings_rows else None), base)
    tokenizer.add_special_tokens({"eos_token": "<|done|>"})
    tokenizer.save_pretrained(run)
    if brings_rows:
        assert find_parts(str(base), str(run))[1].rows == rows + 1
    else:
        with raises_fault("SF-TOKENIZER", run):
            find_parts(str(base), str(run))
