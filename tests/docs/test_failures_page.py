"""docs/failures.md says what the code does: its config runs, its commands answer, its numbers are those of the code."""

import json
import re

import pytest
from click.testing import CliRunner

from helpers.doc_pages import ROOT, names, table
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.report.flight import KEPT
from surefoot.runs import slowness
from surefoot.runs.failures import recorder as failures
from surefoot.runs.slowness import _LOOK, _NEAR
from surefoot.system.errors import NOT_REPRODUCED_EXIT_CODE
from surefoot.training import loop
from surefoot.training import profile as window

PAGE = ROOT / "docs" / "failures.md"
TEXT = PAGE.read_text(encoding="utf-8")
BAD_STEP = 6


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_llama(tmp_path / "models" / "base")
    (tmp_path / "data").mkdir()
    rows = [{"instruction": f"Say {n}.", "output": "heron " * n} for n in range(1, 9)]
    (tmp_path / "data" / "train.json").write_text(json.dumps(rows))
    (config,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    (tmp_path / "run.yaml").write_text(config)
    return tmp_path


def commands(word):
    return [
        line.partition("#")[0].split()[1:] for line in re.findall(rf"^surefoot {word} .*$", TEXT, flags=re.MULTILINE)
    ]


def test_the_profile_of_the_page(place):
    (words,) = (words for words in commands("train") if "--profile" in words)
    assert CliRunner().invoke(main, words).exit_code == 0
    profile = {path.name for path in (place / "runs/my-run/profile").iterdir()}
    assert profile == {"profile.json", "profile.png", "trace.json.gz"}
    assert all(f"`{name}`" in TEXT for name in profile)


def test_a_failure_has_the_files_of_the_page_and_its_commands_answer(place, monkeypatch):
    import torch

    real = loop.train_step

    def spoilt(engine, *arguments, **named):
        if named["step"] == BAD_STEP:
            with torch.no_grad():
                next(iter(engine.parameters.values()))[0, 0] = float("nan")
        return real(engine, *arguments, **named)

    monkeypatch.setattr(loop, "train_step", spoilt)
    assert CliRunner().invoke(main, ["train", "run.yaml"]).exit_code == 5
    monkeypatch.undo()
    monkeypatch.chdir(place)
    kept = place / "runs" / "my-run" / f"failure-{BAD_STEP}"
    said = {name for row in table(PAGE, "file", "what it is") for name in names(row[0])}
    assert said == {path.name for path in kept.iterdir()}
    for words in commands("replay"):
        if "runs/broken" in words[1]:
            continue
        words = [word.replace("failure-12", f"failure-{BAD_STEP}") for word in words]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, result.output


def test_a_step_fails_as_the_page_has_it_and_is_run_again(place):
    (words,) = (words for words in commands("train") if "--profile" not in words)
    tries = [words for words in commands("replay") if "runs/broken" in words[1]]
    assert CliRunner().invoke(main, words).exit_code == 5
    exact, plain = (CliRunner().invoke(main, [*words, "--json"]) for words in tries)
    assert (exact.exit_code, plain.exit_code) == (0, 0)
    exact, plain = (json.loads(one.stdout) for one in (exact, plain))
    assert [exact[key] for key in ("plain", "same", "same_bits")] == [False, True, True]
    assert [plain[key] for key in ("plain", "same")] == [True, True]
    sound = [word for word in words if not word.startswith(("optim.lr", "output"))]  # twin
    assert CliRunner().invoke(main, [*sound, "output=runs/sound"]).exit_code == 0
    assert not list((place / "runs" / "sound").glob("failure-*"))


def test_the_numbers_of_the_page():
    codes = {int(row[0]) for row in table(PAGE, "exit code", "meaning")}
    assert codes == {0, 2, 4, NOT_REPRODUCED_EXIT_CODE}
    told = [
        f"the last {KEPT} to {2 * KEPT}",
        f"left out above {failures.LARGEST >> 20} MiB",
        f"median of the {slowness.WINDOW} steps before",
        f"more than {round(100 * (1 - slowness.FALL))} % slower",
        f"none for {slowness.QUIET} steps",
        f"above {round(100 * _NEAR)} %",
        f"the run sleeps {_LOOK} s",
    ]
    assert all(words in " ".join(TEXT.split()) for words in told)
    assert (failures.MOST, window.WARM_UP, window.TRACED, slowness.RECENT) == (4, 2, 2, 5)  # in words on the page
