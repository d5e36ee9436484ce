"""Prompt, better and worse answer, and judged answers, have the token ids that TRL 1.16 gives them."""

import json
from pathlib import Path

import numpy as np
import pytest

from equality.preference_data import DATA, digest, judged, pairs
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.methods.examples import prepare_examples
from surefoot.runs.load_models import planned_tokenizer
from surefoot.runs.make_plan import make_plan

RECORDED = json.loads(Path(__file__).with_name("trl_preference_data.json").read_text(encoding="utf-8"))
LONG = 16384  # tokens: more than any record has, because TRL cuts elsewhere
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data sets are not on this machine")


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = tiny_llama(tmp_path / "base", pad=True)
    config_file = base / "config.json"
    model = json.loads(config_file.read_text()) | {"max_position_embeddings": LONG}
    config_file.write_text(json.dumps(model))

    def prepare(stage, records):
        path = tmp_path / "records.json"
        path.write_text(json.dumps(records), encoding="utf-8")
        config = run_config(stage=stage, model=str(base), data={"train": str(path), "max_length": LONG})
        tokens = make_plan(config, measure=False).tokenizer
        return prepare_examples(config, tokens, planned_tokenizer(base, tokens)).train

    return prepare


def parts(example) -> tuple[list[int], list[int]]:
    """Prompt and answer."""
    begin = int(np.argmax(example.supervised))
    assert example.supervised[begin:].all()
    return example.ids[:begin].tolist(), example.ids[begin:].tolist()


def pair_digests(data) -> list[str]:
    found = []
    for index in range(0, len(data), 2):
        (prompt, better), (same, worse) = parts(data[index]), parts(data[index + 1])
        assert prompt == same
        found.append(digest(prompt, better, worse))
    return found


def test_pairs(prepared):
    assert pair_digests(prepared("dpo", pairs())) == RECORDED["dpo"]


def test_judged_answers(prepared):
    data = prepared("kto", judged())
    found = [[digest(*parts(data[index])), bool(good)] for index, good in enumerate(data.good)]
    assert found == RECORDED["kto"]


def test_twin_answers_that_changed_places_differ(prepared):
    swapped = [record | {"chosen": record["rejected"], "rejected": record["chosen"]} for record in pairs()[:40]]
    same = [record["chosen"] == record["rejected"] for record in swapped]
    found = pair_digests(prepared("dpo", swapped))
    assert [one == recorded for one, recorded in zip(found, RECORDED["dpo"], strict=False)] == same
