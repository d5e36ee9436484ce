"""Secrets that a run meets stand in nothing that it writes or prints: canaries, and a search through everything."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from faults.place import PROMPTS, Place
from helpers.secret_formats import CONTEXTS, LIKE_A_HASH, NAMES, drawn
from surefoot.system import posting, redaction
from surefoot.training import loop

BY_PATTERN = "hf_" + "CanaryByPattern" * 2
BY_NAME = "canary-by-name-7"
IN_ADDRESS = "canary-in-address-8"
AS_HEX = "ca4a" * 10  # as W&B's keys look
SLASHED = "canary/in@address-9"
SHAPED = [token for shape, token in drawn(9).items() if shape not in LIKE_A_HASH]
NAMED = [(name, f"canary{number}x") for number, name in enumerate(NAMES)]
CANARIES = (BY_PATTERN, BY_NAME, IN_ADDRESS, AS_HEX, SLASHED, *SHAPED, *(value for _, value in NAMED))
ENVIRONMENT = {
    "HF_TOKEN": BY_PATTERN,
    "HUGGING_FACE_HUB_TOKEN": BY_PATTERN,
    "WANDB_API_KEY": AS_HEX,
    "MLFLOW_TRACKING_PASSWORD": BY_NAME,
    "AWS_SECRET_ACCESS_KEY": BY_NAME,
    "MY_PASSWORD": BY_NAME,
    "HTTPS_PROXY": f"http://me:{IN_ADDRESS}@127.0.0.1:9",
}
SAID = f"GET https://me:{IN_ADDRESS}@host/?token={BY_PATTERN} api_key={BY_NAME} Bearer {AS_HEX} failed"
# Of the list by formats; notations take turns.
LISTED = [
    f"postgres://me:{SLASHED}@host/db",
    *SHAPED,
    *(CONTEXTS[place % len(CONTEXTS)].format(name=name, value=value) for place, (name, value) in enumerate(NAMED)),
]
THEIRS = {
    "model_name_or_path": "m", "stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset": "d",
    "template": "alpaca", "output_dir": "o", "hf_hub_token": BY_NAME,
}  # fmt: skip


@pytest.fixture
def secretive(place: Place) -> Place:
    """Canaries in the environment; what goes to the user's own folders stays below the place."""
    for name, value in ENVIRONMENT.items():
        place.patch.setenv(name, value)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        place.patch.setenv(name, str(place.folder / "home"))
    place.patch.setenv("MLFLOW_TRACKING_URI", str(place.folder / "mlruns"))
    place.patch.setenv("TRACKIO_DIR", str(place.folder / "trackio"))
    return place


def found(folder: Path, printed: str, given: Sequence[str] = ()) -> set[tuple[str, str]]:
    """(canary, where it stands): files by name, and what was printed. given: files that the user wrote."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    texts = {name: text for name, text in files.items() if name not in given} | {"printed": printed.encode()}
    names = " ".join(files).encode()
    return {
        (canary, name)
        for name, text in (texts | {"names": names}).items()
        for canary in CANARIES
        if canary.encode() in text
    }


def call(place: Place, *words: str, code: int | None = None) -> str:
    """All that a command printed. code: the exit code that it must have."""
    result = place.call(*words)
    assert code is None or result.exit_code == code, result.output
    assert "internal error" not in result.output or code == 1, result.output
    return f"{result.output}\n"


def failing_at(step: int, said: str) -> pytest.MonkeyPatch:
    """A step whose exception tells secrets. Undo it to let the step pass."""
    train_step = loop.train_step

    def failing(*arguments: Any, **named: Any) -> Any:
        if named["step"] == step:
            raise RuntimeError(said)
        return train_step(*arguments, **named)

    patch = pytest.MonkeyPatch()
    patch.setattr(loop, "train_step", failing)
    return patch


def a_run_that_fails(place: Place) -> str:
    """At step 4, told with its traceback; gone on with, replayed, verified, compared, exported."""
    config, out = place.config(), str(place.folder / "out")
    patch = failing_at(4, " | ".join([SAID, *LISTED]))
    try:
        printed = call(place, "--debug", "train", config, "checkpoint.every=3 steps", code=1)
    finally:
        patch.undo()
    (failure,) = (place.folder / "out").glob("failure-*")
    printed += call(place, "train", config, "checkpoint.every=3 steps", "--resume", code=0)
    printed += call(place, "replay", str(failure))
    printed += call(place, "verify", out, code=0)
    printed += call(place, "compare", out, out, code=0)
    return printed + call(place, "export", out, "--merge", "--out", str(place.folder / "whole"), code=0)


def looked_at_before(place: Place) -> str:
    config = place.config()
    printed = "".join(call(place, word, config, code=0) for word in ("plan", "data"))
    return printed + call(place, "doctor", config, "--json") + call(place, "doctor", config)


def refused(place: Place) -> str:
    """Settings, flags and addresses with secrets in them, where none is wanted."""
    config = place.config()
    wrong = [
        [f"hub_token={BY_NAME}"], [f"tracking.wandb_api_key={AS_HEX}"], [f"tracking.nmae={BY_PATTERN}"],
        [f"model=https://me:{IN_ADDRESS}@host/m"], [f"data.train=https://me:{IN_ADDRESS}@host/x.json"],
        ["--hub-token", BY_NAME], [f"--hub_token={BY_NAME}"], [f"optim.lr={BY_PATTERN}"],
    ]  # fmt: skip
    printed = "".join(call(place, "--debug", "train", config, *words, code=2) for words in wrong)
    place.change(hub_token=BY_NAME, tracking={"api_key": AS_HEX, "name": 3}, env={"HF_TOKEN": BY_PATTERN})
    return printed + call(place, "train", place.config(), code=2)


def scored(place: Place) -> str:
    """A reward of the user's own that quotes a key, and a server's address with one."""
    place.lines("train.jsonl", PROMPTS * 3)
    place.text("score.py", f"def score(prompts, responses):\n    raise RuntimeError({SAID!r})\n")
    reward = str(place.folder / "score.py")
    ppo = {"reward": f"{reward}:score", "max_new_tokens": 4}
    place.change(stage="ppo", data={"train": str(place.folder / "train.jsonl")}, ppo=ppo, duration="1 step")
    printed = call(place, "--debug", "train", place.config(), code=2)
    assert "error:" in (place.folder / "out" / "run.log").read_text()
    Path(reward).unlink()
    place.patch.setattr(posting, "Server", partial(posting.Server, pause=0.0))  # nobody comes to answer
    address = f"ppo.reward=http://127.0.0.1:9/score?api_key={BY_NAME}"
    return printed + call(place, "--debug", "train", place.config(), address, "--overwrite")


def other_tools(place: Place) -> str:
    theirs = str(place.text("theirs.yaml", yaml.safe_dump(THEIRS)))
    trl = [
        "trl",
        "sft",
        "--model_name_or_path",
        "m",
        "--dataset_name",
        "d",
        "--output_dir",
        "o",
        "--hub_token",
        BY_NAME,
    ]
    script = ["env", f"HF_TOKEN={BY_PATTERN}", f"WANDB_API_KEY={AS_HEX}", "accelerate", "launch", "finetune.py"]
    words = [*script, "--base_model", "m", "--data_path", "d.json", "--hub_token", BY_NAME]
    printed = call(place, "translate", theirs) + call(place, "translate", theirs, "--json")
    for command in (trl, words, ["llamafactory-cli", "train", theirs]):
        printed += call(place, "translate", "--", *command) + call(place, "--debug", "run", "--", *command)
    return printed + call(place, "translate", theirs, "--out", str(place.folder / "ours.yaml"))


def with_trackers(place: Place) -> str:
    place.change(duration="2 steps", report_to=["tensorboard", "mlflow", "trackio"], tracking={"offline": True})
    return call(place, "train", place.config(), code=0)


def with_wandb(place: Place) -> str:
    place.change(duration="2 steps", report_to=["wandb"], tracking={"offline": True})
    return call(place, "train", place.config(), code=0)


def tuned(place: Place) -> str:
    return call(place, "tune", place.config(), "--seconds", "0.5", code=0)


STORIES: dict[str, Callable[[Place], str]] = {
    "a run that fails": a_run_that_fails,
    "looked at before": looked_at_before,
    "refused": refused,
    "scored": scored,
    "other tools": other_tools,
    "trackers": with_trackers,
    "W&B": with_wandb,
    "tune": tuned,
}
LONG = ("W&B", "tune")  # a minute each


@pytest.mark.parametrize(
    "story", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in STORIES]
)
def test_no_canary_in_anything(story: str, secretive: Place) -> None:
    printed = STORIES[story](secretive)
    assert found(secretive.folder, printed, ("run.yaml", "theirs.yaml")) == set()


@pytest.mark.parametrize(
    ("story", "canaries"),
    [
        ("scored", {BY_PATTERN, BY_NAME, IN_ADDRESS, AS_HEX}),
        ("a run that fails", {BY_PATTERN, BY_NAME, IN_ADDRESS, AS_HEX}),
        ("refused", {BY_PATTERN, BY_NAME, IN_ADDRESS}),
    ],
)
def test_twin_without_redaction_they_are_found(story: str, canaries: set[str], secretive: Place) -> None:
    for name in ("_LONG", "_SHAPES", "_NAME"):
        secretive.patch.setattr(redaction, name, re.compile(r"(?!)"))
    printed = STORIES[story](secretive)
    assert canaries <= {canary for canary, _ in found(secretive.folder, printed, ("run.yaml",))}
