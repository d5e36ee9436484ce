"""docs/preference.md says what the code does: losses, references, where runs begin, a config that runs."""

import json
import re

import pytest

from helpers.doc_pages import ROOT
from helpers.fork_server import ForkServer
from helpers.growing_records import page_of_pairs
from surefoot.method_facts.losses import PAIR_LOSSES

PAGE = (ROOT / "docs" / "preference.md").read_text(encoding="utf-8")
FP32 = 1e-5  # of losses at the start, where policy and reference differ by nothing
STARTS = {"sigmoid": 0.693147, "ipo": 25.0, "hinge": 1.0}  # beta 0.1: 1 / (4 beta^2) = 25


def first_column(section: str) -> list[str]:
    below = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in below.splitlines() if line.startswith("|")][2:]


def test_every_loss_has_its_line():
    named = {re.findall(r"`([\w-]+)`", cell)[0] for cell in first_column("Losses")}
    assert named == set(PAIR_LOSSES)


def test_every_reference_has_its_line():
    named = {word for cell in first_column("The reference") for word in re.findall(r"`([\w-]+)`", cell)}
    assert named == {"auto", "adapter-off", "model", "cached"}


def test_the_recipes_exist():
    for name in re.findall(r"recipes/[\w-]+\.yaml", PAGE):
        assert (ROOT / name).is_file(), name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return page_of_pairs(tmp_path_factory.mktemp("page"), PAGE, "dpo")


def test_its_config_runs_and_begins_where_it_says(place):
    with ForkServer() as server:
        for loss, start in STARTS.items():
            log = place / f"{loss}.txt"
            words = ["batch.size=4", "duration=1 step", f"alignment.loss={loss}", f"output=runs/{loss}"]
            assert server.run(["train", "dpo.yaml", *words], log, folder=place) == 0, log.read_text()
            rows = (place / "runs" / loss / "trainer_log.jsonl").read_text().splitlines()
            begun = json.loads(rows[0])
            assert begun["eval_loss"] == pytest.approx(start, rel=FP32)
            assert (begun["eval_reward_margin"], begun["eval_reward_accuracy"]) == (0, 0.5)
        log = place / "generate.txt"
        words = ["generate", "runs/sigmoid", "--prompt", "Say sky 3 times.", "--max-new-tokens", "4"]
        assert server.run(words, log, folder=place) == 0, log.read_text()
