"""docs/ppo.md: what is logged, tolerances, limits of a server that scores, and a function that scores."""

import re

import torch

from helpers.doc_pages import ROOT, table
from surefoot.methods.losses.ppo import policy_loss
from surefoot.methods.ppo.checks import START_TOLERANCE
from surefoot.methods.ppo.holds import RolloutStatistics
from surefoot.methods.ppo.scores import named_scorer
from surefoot.system.posting import Server

PAGE = ROOT / "docs" / "ppo.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_every_logged_name_has_its_line():
    figures = RolloutStatistics(1, 0, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0).metrics()
    _, sums = policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.2)
    others = {"kl_coef", "entropy", "policy_loss", "value_loss", "text_loss"}
    named = {row[0].strip("`") for row in table(PAGE, "name", "meaning", "what is good")}
    assert named == figures.keys() | sums.keys() | others


def test_its_tolerances_are_those_of_the_code():
    sentence = " ".join(re.findall(r"\(1e-3 nats.*?\)", TEXT, flags=re.DOTALL)[0].split())
    assert sentence == "(1e-3 nats per token in fp32, 2e-2 in fp16, 1e-1 in bf16)"
    assert START_TOLERANCE == {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1}


def test_the_function_of_the_page_scores(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(code)
    (named,) = re.findall(r"`ppo\.reward: (\S+)`", TEXT)
    scorer = named_scorer(named)
    assert scorer is not None
    assert scorer(["a", "b"], ["Thank you", "No"]) == [1 - 0.09, -0.02]


def test_its_limits_are_those_of_the_code():
    server = Server("http://127.0.0.1")
    assert f"within {server.timeout:.0f} seconds" in " ".join(TEXT.split())
    assert server.tries == 3
    assert "three requests in all" in " ".join(TEXT.split())
