"""docs/rollouts.md: its function scores, and its figures are those of the code."""

from __future__ import annotations

import re

from pages import ROOT
from surefoot.methods.ppo.scorers import open_scorer
from surefoot.system.posting import Server

PAGE = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")


def test_the_function_of_the_page_scores(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(code)
    (named,) = re.findall(r"`ppo\.reward: (\S+)`", PAGE)
    scorer = open_scorer(named)
    assert scorer is not None
    assert scorer(["a", "b"], ["Thank you", "No"]) == [1 - 0.09, -0.02]


def test_its_limits_are_those_of_the_code():
    server = Server("http://127.0.0.1")
    assert f"It has {server.timeout:.0f} seconds" in PAGE
    assert server.tries == 3
    assert "three times in all" in PAGE
