"""docs/reward.md says what the code does: losses, a config that runs, commands that answer."""

import json
import re

import pytest

from helpers.doc_pages import ROOT, table
from helpers.fork_server import ForkServer
from helpers.growing_records import page_of_pairs
from surefoot.methods.losses.reward import LOSSES

PAGE = ROOT / "docs" / "reward.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_loss_has_its_line():
    assert [row[0] for row in table(PAGE, "`reward.loss`", "what is compared")] == [f"`{name}`" for name in LOSSES]


def test_the_recipes_exist():
    found = re.findall(r"recipes/[\w-]+\.yaml", TEXT)
    assert found
    assert all((ROOT / name).is_file() for name in found)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return page_of_pairs(tmp_path_factory.mktemp("page"), TEXT, "reward")


def test_its_config_runs_begins_at_ln_2_and_its_commands_answer(place):
    with ForkServer() as server:
        log = place / "log.txt"
        words = ["train", "reward.yaml", "duration=2 steps", "batch.size=4"]
        assert server.run(words, log, folder=place) == 0, log.read_text()
        first = json.loads((place / "runs/reward/trainer_log.jsonl").read_text().splitlines()[0])
        assert first["loss"] == pytest.approx(0.693147, rel=1e-5)
        (commands,) = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
        for line in commands.splitlines():
            assert server.run(line.split()[1:], log, folder=place) == 0, log.read_text()
    assert (place / "measured" / "calibration.png").is_file()
    names = {"reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected"}
    assert names <= first.keys()  # as the page calls them
    assert all(f"`{name}`" in TEXT for name in names)
