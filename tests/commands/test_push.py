"""`surefoot push` sends the published model and nothing else, through the real client to a hub on this machine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from helpers.fork_server import ForkServer
from helpers.hub_stub import GOOD_TOKEN, OUTSIDER, READER, HubStub, client_of, point_at, serve
from helpers.tiny_models import tiny_llama
from surefoot.commands import push as stage
from surefoot.commands.main import main
from surefoot.report.footer import EXAMPLE_PROMPT

RECORDS = [{"instruction": f"Say heron {k} times.", "input": "", "output": "heron " * k} for k in range(1, 9)]
NAME = "me/heron"
BASE = "org/base"


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


def call(*arguments: str | Path, base: str | None = BASE) -> Result:
    return CliRunner().invoke(main, ["push", *map(str, arguments), *(["--base", base] if base else [])])


def code(result: Result) -> tuple[int, str]:
    """The exit code, and the code of what was refused in one line."""
    (line,) = result.stderr.splitlines()
    return result.exit_code, line.rpartition(" [")[2].removesuffix("]")


def test_what_is_no_finished_run_or_no_name_is_refused(run: Path, tmp_path: Path) -> None:
    """Only what can go on is told how."""
    assert code(call(tmp_path, NAME, "--dry-run")) == (2, "SF-USE-FOLDER")
    assert code(call(run, "a/heron/b")) == (2, "SF-HUB-MISSING")
    (run / "trainer_state.json").unlink()
    unfinished = call(run, NAME, "--dry-run")
    assert code(unfinished) == (2, "SF-USE-FOLDER")
    assert "--resume" in unfinished.stderr
    assert "--resume" not in call(tmp_path, NAME, "--dry-run").stderr


def check_only_the_model_is_there(hub: HubStub, run: Path) -> None:
    there = hub.files("models", NAME)
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= set(there)
    kept = ("config.yaml", "plan.json", "environment.json", "data.json", "run.log", "report.html", "state.json")
    assert not [name for name in there if name in kept or "checkpoint" in name or name.endswith((".jsonl", ".png"))]
    for name in there:
        content = (hub.root / "models" / NAME / name).read_text(errors="replace")
        assert name == "tokenizer.json" or str(run.parent) not in content, name
        if name == "adapter_config.json":
            theirs, ours = json.loads(content), json.loads((run / name).read_text())
            assert theirs == {**ours, "base_model_name_or_path": BASE}
            continue
        assert (hub.root / "models" / NAME / name).read_bytes() == (run / name).read_bytes()


def test_the_model_arrives_in_private(hub: HubStub, run: Path) -> None:
    result = call(run, NAME)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"pushed: {hub.endpoint}/{NAME}/commit/")
    assert hub.private == {NAME: True}
    check_only_the_model_is_there(hub, run)
    assert call(run, NAME).exit_code == 0, "a second push goes to the same place"
    again = call(run, NAME.partition("/")[2])
    assert again.stdout.startswith(f"pushed: {hub.endpoint}/{NAME}/commit/"), "a name alone is in the token's account"


def test_twin_a_wider_pattern_would_be_noticed(hub: HubStub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    monkeypatch.setattr(stage, "_MODEL", re.compile(".*"))
    monkeypatch.setattr(stage, "check_files", lambda run: [*check(run), *check(run / "checkpoint-1", "checkpoint-1/")])
    call(run, NAME)
    with pytest.raises(AssertionError):
        check_only_the_model_is_there(hub, run)


def check(folder: Path, prefix: str = "") -> list[object]:
    from dataclasses import replace

    from surefoot.training.manifest import check_files

    return [replace(one, name=prefix + one.name) for one in check_files(folder)]


def test_public_only_when_asked(hub: HubStub, run: Path) -> None:
    assert call(run, NAME, "--public").exit_code == 0
    assert hub.private == {NAME: False}
    assert code(call(run, NAME)) == (2, "SF-HUB-PUSH")


def test_a_dry_run_asks_nobody(hub: HubStub, run: Path) -> None:
    result = call(run, NAME, "--dry-run")
    assert result.exit_code == 0
    assert "adapter_model.safetensors" in result.stdout
    assert hub.asked == []


def test_what_is_not_right_is_not_pushed(hub: HubStub, run: Path) -> None:
    weights = run / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert code(call(run, NAME)) == (4, "SF-CHECKPOINT-DAMAGED")
    weights.write_bytes(content)
    (run / "trainer_state.json").unlink()
    assert code(call(run, NAME)) == (2, "SF-USE-FOLDER")
    assert hub.asked == []


def test_the_card_is_there_to_be_edited(hub: HubStub, run: Path) -> None:
    card = run / "README.md"
    card.write_text(card.read_text() + "\nHerons!\n")
    assert call(run, NAME).exit_code == 0
    assert "Herons!" in (hub.root / "models" / NAME / "README.md").read_text()


def test_twin_that_hashes_the_card(hub: HubStub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "CARD", "other")
    with pytest.raises(AssertionError):
        test_the_card_is_there_to_be_edited(hub, run)


def test_a_path_of_this_machine_in_the_card_is_not_pushed(hub: HubStub, run: Path) -> None:
    card = run / "README.md"
    card.write_text(card.read_text() + "\nData: /home/me/secret/train.json\n")
    result = call(run, NAME)
    assert code(result) == (2, "SF-HUB-PUSH")
    assert "/home/me/secret/train.json" in result.stderr
    assert hub.asked == []


def test_a_local_base_is_not_pushed(hub: HubStub, run: Path) -> None:
    for option in ((), ("--dry-run",)):
        result = call(run, NAME, *option, base=None)
        assert code(result) == (2, "SF-HUB-PUSH")
        assert "--base OWNER/NAME" in result.stderr
    assert hub.asked == []
    assert call(run, NAME, base="base").exit_code == 2


def test_a_base_on_the_hub_goes_as_it_stands(run: Path) -> None:
    path = run / "adapter_config.json"
    path.write_text(json.dumps({"base_model_name_or_path": "org/base", "revision": "c" * 40}))
    assert stage._with_base(run, None) == stage._with_base(run, "org/base") == {}


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("config.json", '{"a": [{"b": "/srv/models/base"}]}', 1),
        ("tokenizer_config.json", '{"vocab_file": "C:\\\\models\\\\v.txt"}', 1),
        ("config.json", '{"a": "see /usr/bin", "b": "and/or/not", "c": "https://a.b/c/d"}', 0),
        ("tokenizer.json", '{"vocab": {"a": "/usr/bin"}}', 0),
        ("chat_template.jinja", "run /usr/bin/python", 0),
        ("chat_template.jinja", "{# {folder}/x #}", 1),
        ("chat_template.jinja", "{# {home}/x #}", 1),
    ],
)
def test_paths_in_other_files(tmp_path: Path, name: str, text: str, found: int) -> None:
    text = text.replace("{folder}", str(tmp_path)).replace("{home}", str(Path.home()))
    assert len(list(stage._paths(tmp_path / name, text.encode()))) == found


def test_the_card_quotes_no_record_of_a_users_file(run: Path) -> None:
    card = (run / "README.md").read_text()
    assert EXAMPLE_PROMPT in card
    assert not any(record["instruction"] in card for record in RECORDS)


def test_what_is_no_path_of_this_machine() -> None:
    for line in ("https://huggingface.co/a/b", "a and/or b", "1/2", "[x](../y/z)", "loss 3.1/step", "org/name/x"):
        assert stage._ABSOLUTE.search(line) is None, line


@pytest.mark.parametrize("token", [OUTSIDER, READER])
def test_without_a_right_to_write(hub: HubStub, run: Path, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    result = call(run, NAME)
    assert code(result)[0] == 3
    assert token not in result.stderr
    monkeypatch.delenv("HF_TOKEN")
    without = call(run, NAME)
    assert code(without)[0] == 3
    assert without.stderr != result.stderr


def test_a_hub_that_cannot_be_reached(hub: HubStub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9")
    result = call(run, NAME)
    assert (result.exit_code, len(result.stderr.splitlines())) == (3, 1)


def test_train_pushes_at_its_end(hub: HubStub, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(finished.parent / "run.yaml")
    monkeypatch.setattr(stage, "looks_local", lambda path: False)  # as if the base lay on the hub
    monkeypatch.setattr(stage, "_with_base", lambda run, base: {})
    monkeypatch.setattr(stage, "_paths", lambda path, content: [])
    result = CliRunner().invoke(main, ["train", config, "--resume", "--push", NAME])
    assert result.exit_code == 0, result.output
    assert f"pushed: {hub.endpoint}/{NAME}/commit/" in result.stdout


def refused_before_training(config: Path, name: str, *overrides: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["train", str(config), "--push", name, *overrides])
    assert not (config.parent / "other").exists()
    return result.exit_code, result.stderr.rstrip().rpartition(" [")[2].removesuffix("]")


def test_train_asks_before_step_1(hub: HubStub, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, whole = finished.parent / "run.yaml", ("adapter=null", f"output={finished.parent / 'other'}")
    hub.add("models", "me/open", {"README.md": "x"})
    for name, overrides, refusal in (
        ("a/heron/b", whole, (2, "SF-HUB-MISSING")),
        ("me/a--b", whole, (2, "SF-HUB-PUSH")),
        (NAME, whole[1:], (2, "SF-HUB-PUSH")),
        ("me/open", whole, (2, "SF-HUB-PUSH")),
    ):
        assert refused_before_training(config, name, *overrides) == refusal
    assert refused_before_training(config, "stranger/heron", *whole)[0] == 3
    monkeypatch.setenv("HF_TOKEN", READER)
    assert refused_before_training(config, NAME, *whole)[0] == 3
    monkeypatch.delenv("HF_TOKEN")
    assert refused_before_training(config, NAME, *whole)[0] == 3


def test_twin_that_asks_at_the_end(hub: HubStub, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "check_push", lambda config, name: None)
    monkeypatch.setattr("surefoot.runs.run.train_run", lambda *_, **__: 75)
    with pytest.raises(AssertionError):
        test_train_asks_before_step_1(hub, finished, monkeypatch)
