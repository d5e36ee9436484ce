"""`surefoot push` sends the published model and nothing else, through the real client to a hub on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from forkserver import ForkServer
from hub_stub import GOOD_TOKEN, OUTSIDER, HubStub, client_of, point_at, serve
from surefoot.cli.main import main
from surefoot.stages import push as stage
from tiny import tiny_llama

RECORDS = [{"instruction": f"Say heron {k} times.", "input": "", "output": "heron " * k} for k in range(1, 9)]
NAME = "me/heron"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    (folder / "train.json").write_text(json.dumps(RECORDS))
    config = {
        "stage": "sft",
        "model": str(tiny_llama(folder / "base")),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": str(folder / "train.json"), "max_length": 64},
        "batch": {"size": 4},
        "duration": "1 step",
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with ForkServer() as server:
        log = folder / "log.txt"
        assert server.run(["train", str(folder / "run.yaml")], log) == 0, log.read_text()
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with serve(tmp_path / "hub") as stub, client_of(stub, tmp_path / "cache") as patch:
        patch.setenv("HF_TOKEN", GOOD_TOKEN)
        yield stub


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["push", *map(str, arguments)])


def check_only_the_model_is_there(hub: HubStub, run: Path) -> None:
    there = hub.files("models", NAME)
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= set(there)
    kept = ("config.yaml", "plan.json", "environment.json", "data.json", "run.log", "report.html", "state.json")
    assert not [name for name in there if name in kept or "checkpoint" in name or name.endswith((".jsonl", ".png"))]
    for name in there:
        assert (hub.root / "models" / NAME / name).read_bytes() == (run / name).read_bytes()


def test_the_model_arrives_in_private(hub: HubStub, run: Path) -> None:
    result = call(run, NAME)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"pushed: {hub.endpoint}/{NAME}/commit/")
    assert hub.private == {NAME: True}
    check_only_the_model_is_there(hub, run)
    assert call(run, NAME).exit_code == 0, "a second push goes to the same place"


def test_twin_a_wider_pattern_would_be_noticed(hub: HubStub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.setattr(stage, "_MODEL", re.compile(".*"))
    monkeypatch.setattr(stage, "check_files", lambda run: [*check(run), *check(run / "checkpoint-1", "checkpoint-1/")])
    call(run, NAME)
    with pytest.raises(AssertionError):
        check_only_the_model_is_there(hub, run)


def check(folder: Path, prefix: str = "") -> list[object]:
    from dataclasses import replace

    from surefoot.training.checkpoint import check_files

    return [replace(one, name=prefix + one.name) for one in check_files(folder)]


def test_public_only_when_asked(hub: HubStub, run: Path) -> None:
    assert call(run, NAME, "--public").exit_code == 0
    assert hub.private == {NAME: False}
    result = call(run, NAME)
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: {NAME}: exists and is public; push to another name, or give --public\n",
    )


def test_a_dry_run_asks_nobody(hub: HubStub, run: Path) -> None:
    result = call(run, NAME, "--dry-run")
    assert result.exit_code == 0
    assert "adapter_model.safetensors" in result.stdout
    assert "would go to me/heron (private); nothing was sent" in result.stdout
    assert hub.asked == []


def test_what_is_not_right_is_not_pushed(hub: HubStub, run: Path) -> None:
    weights = run / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    result = call(run, NAME)
    assert result.exit_code == 4
    assert "SHA-256 differs" in result.stderr
    weights.write_bytes(content)
    (run / "trainer_state.json").unlink()
    assert "is no finished run" in call(run, NAME).stderr
    assert hub.asked == []


def test_a_path_of_this_machine_in_the_card_is_not_pushed(
    hub: HubStub, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = run / "README.md"
    monkeypatch.setattr(stage, "check_files", lambda run: [])  # an edited card fails its hash first
    card.write_text(card.read_text() + "\nData: /home/me/secret/train.json\n")
    result = call(run, NAME)
    assert result.exit_code == 2
    assert "names a path of this machine: /home/me/secret/train.json" in result.stderr
    assert hub.asked == []


@pytest.mark.parametrize(
    "line", ["https://huggingface.co/a/b", "a and/or b", "1/2", "[x](../y/z)", "loss 3.1/step", "org/name/x"]
)
def test_what_is_no_path_of_this_machine(line: str) -> None:
    assert stage._ABSOLUTE.search(line) is None


def test_without_a_right_to_write(hub: HubStub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", OUTSIDER)
    result = call(run, NAME)
    assert (result.exit_code, len(result.stderr.splitlines())) == (3, 1)
    assert "the token that was sent may not write there" in result.stderr
    assert OUTSIDER not in result.stderr
    monkeypatch.delenv("HF_TOKEN")
    assert "pushing needs a token, and there is none" in call(run, NAME).stderr


def test_a_hub_that_cannot_be_reached(hub: HubStub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9")
    result = call(run, NAME)
    assert (result.exit_code, len(result.stderr.splitlines())) == (3, 1)


def test_train_pushes_at_its_end(hub: HubStub, finished: Path) -> None:
    config = str(finished.parent / "run.yaml")
    result = CliRunner().invoke(main, ["train", config, "--resume", "--push", NAME])
    assert result.exit_code == 0, result.output
    assert f"pushed: {hub.endpoint}/{NAME}/commit/" in result.stdout
    check_only_the_model_is_there(hub, finished)
    assert CliRunner().invoke(main, ["train", config, "--push", "heron"]).exit_code == 2


def test_names(run: Path) -> None:
    result = call(run, "heron")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: heron: is no name of a repository; write it like owner/name\n",
    )
