"""Bad settings, machines and run folders: faults P, R, K, E and C of the catalogue."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from faults.case import Case, Words
from faults.data_cases import staged
from faults.place import PAIRS, PROMPTS, ROWS, Place
from surefoot.system import hardware

Prepare = Callable[[Place], Words | None]


def keys(**changes: Any) -> Prepare:
    return lambda place: place.change(**changes)


def words(*given: str) -> Prepare:
    """More words behind the config."""
    return lambda place: ["train", place.config(), *given]


def raw(text: str) -> Prepare:
    """The config with this text behind it."""

    def prepare(place: Place) -> Words:
        config = place.config()
        with open(config, "a", encoding="utf-8", newline="") as file:
            file.write(text)
        return ["train", config]

    return prepare


def whole(content: str | bytes) -> Prepare:
    return lambda place: ["train", str(place.text("run.yaml", content))]


def resumed(spoil: Callable[[Place], object], *given: str) -> Prepare:
    """The finished run, spoilt, and resumed for six more steps."""

    def prepare(place: Place) -> Words:
        place.own_run()
        spoil(place)
        return ["train", place.config(), "--resume", "duration=12 steps", *given]

    return prepare


def waiting(name: str) -> Callable[[Place], None]:
    """A FIFO that nobody writes into, for a file of the run."""

    def spoil(place: Place) -> None:
        path = place.folder / "out" / name
        path.unlink()
        os.mkfifo(path)

    return spoil


def nothing(place: Place) -> None:
    pass


def all_checkpoints(name: str, change: Callable[[bytes], bytes]) -> Callable[[Place], None]:
    def spoil(place: Place) -> None:
        for folder in (place.folder / "out").glob("checkpoint-*"):
            (folder / name).write_bytes(change((folder / name).read_bytes()))

    return spoil


def flipped(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 4]) + content[-2:]


def other_data(place: Place) -> None:
    place.lines("train.json", [*ROWS[:-1], {**ROWS[-1], "output": "else"}])


def other_base(place: Place) -> None:
    place.weights(lambda own: own["model.norm.weight"].add_(1.0))


def raising(error: BaseException, step: int = 3) -> Callable[[Place], None]:
    """The step fails in this way."""

    def spoil(place: Place) -> None:
        from surefoot.training import loop

        train_step = loop.train_step

        def failing(*arguments: Any, **named: Any) -> Any:
            if named["step"] >= step:
                raise error
            return train_step(*arguments, **named)

        place.patch.setattr(loop, "train_step", failing)

    return spoil


def occupied(place: Place) -> None:
    place.text("out/thesis.txt", "years of work")


def a_file(place: Place) -> None:
    place.text("out", "years of work")


def not_writable(place: Place) -> None:
    place.change(output="/proc/surefoot-run")


def in_use(place: Place) -> Words:
    """By a process that is alive: the one that runs the tests."""
    import fcntl

    place.own_run()
    handle = os.open(place.folder / "out" / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}".encode())
    place.held.append(handle)
    return ["train", place.config(), "--resume", "duration=12 steps"]


def ppo(body: str, **settings: Any) -> Prepare:
    """A reward function of the user's with this body."""

    def prepare(place: Place) -> None:
        place.text("score.py", f"def f(prompts, responses):\n    {body}\n")
        staged("ppo", PROMPTS)(place)
        given = {"max_new_tokens": 8, "reward": f"{place.folder / 'score.py'}:f", **settings}
        place.change(ppo=given, data={"max_length": 64}, duration="2 steps")

    return prepare


def other_reference(place: Place) -> Words:
    """Of a run of the stage dpo, after its second step."""
    reference = shutil.copytree(place.own_base(), place.folder / "reference")
    staged("dpo", PAIRS, alignment={"reference": str(reference)})(place)
    assert place.call("train", place.config(), "duration=2 steps").exit_code == 0
    tensors = load_file(reference / "model.safetensors")
    save_file({name: tensor + 1.0 for name, tensor in tensors.items()}, reference / "model.safetensors")
    return ["train", place.config(), "--resume", "duration=4 steps"]


def export(*given: str, spoil: Callable[[Place], object] = nothing) -> Prepare:
    def prepare(place: Place) -> Words:
        place.own_run()
        spoil(place)
        return ["export", *(word.format(folder=place.folder, base=place.base) for word in given)]

    return prepare


def wider_base(place: Place) -> None:
    place.json(place.own_base() / "config.json", lambda own: own.update(intermediate_size=32))


def planned_with(**given: str) -> Prepare:
    """The plan under these variables of the environment."""

    def prepare(place: Place) -> Words:
        for name, value in given.items():
            place.patch.setenv(name, value)
        return ["plan", place.config()]

    return prepare


def other_libraries(place: Place) -> None:
    then = hardware.versions()
    place.patch.setattr(hardware, "versions", lambda: {**then, "torch": "9.9.9"})


def small_disk(place: Place) -> None:
    place.patch.setattr(hardware, "free_disk", lambda path: 1000)


PRECISION = [
    Case(
        "P1",
        "fp16 weights that train",
        keys(adapter=None, precision={"base": "fp16"}),
        2,
        ("run.yaml:", "precision.base", "Attempting to unscale", "precision: fp16"),
    ),
    Case("P3", "a scaler", keys(precision={"scaler": True}), 2, ("run.yaml:", "precision.scaler", "unknown key")),
    Case("P3", "fp16 and bf16 as elsewhere", keys(fp16=True), 2, ("run.yaml:", "fp16", "precision")),
    Case(
        "P5",
        "a rate beyond all",
        keys(optim={"lr": 1e30, "max_grad_norm": None, "warmup": 0.0}, adapter=None, duration="12 steps"),
        5,
        ("step", "not finite", "in a row", "examples"),
        writes=True,
    ),
    Case("P9", "device_map", keys(device_map="auto"), 2, ("run.yaml:", "device_map", "unknown key")),
    Case("P2", "an unknown type", keys(precision="fp8"), 2, ("run.yaml:", "precision.compute", "bf16")),
    Case("P2", "4 bits without an adapter", keys(adapter=None, precision={"base": "nf4"}), 2, ("precision.base",)),
]
RUNTIME = [
    Case(
        "R1",
        "no memory at step 3",
        resumed(raising(torch.OutOfMemoryError("Tried to allocate 2 GiB"), 7)),
        3,
        ("out of memory", "2 GiB", "--resume", "batch.micro"),
        writes=True,
    ),
    Case("R1", "no memory for Python", resumed(raising(MemoryError(), 7)), 3, ("out of memory",), writes=True),
    Case(
        "R2",
        "a device that fails at step 7",
        resumed(raising(torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more"), 7)),
        3,
        ("training", "failed: CUDA error: an illegal memory access was encountered", "go on with --resume"),
        writes=True,
    ),
    Case("R10", "a place where nobody writes", not_writable, 3, ("/proc/surefoot-run", "cannot be written")),
    Case("R10", "a file for a run folder", a_file, 2, ("out", "is a file")),
    Case("R11", "no room for a checkpoint", small_disk, 3, ("are free", "need at least", "make room")),
    Case("R13", "a folder in use", in_use, 3, ("is in use by process", "wait for it to end")),
    Case("R13", "a run is there", resumed(nothing), 0, (), writes=True),
    Case(
        "R13",
        "a run is there and nothing is said of it",
        lambda place: place.own_run() and None,
        2,
        ("out", "--resume", "--overwrite"),
    ),
    Case("R13", "another's folder", occupied, 2, ("out", "is not empty")),
    Case(
        "R13",
        "another's folder, to be replaced",
        lambda place: occupied(place) or words("--overwrite")(place),
        2,
        ("out", "no surefoot run", "nothing in it was touched"),
    ),
    Case(
        "R13", "another's folder, to go on in", lambda place: occupied(place) or words("--resume")(place), 2, ("out",)
    ),
    Case(
        "R15",
        "every checkpoint flipped",
        resumed(all_checkpoints("optimizer.safetensors", flipped)),
        4,
        ("optimizer.safetensors", "SHA-256", "no checkpoint verifies"),
        faults=4,
    ),
    Case(
        "R15",
        "every checkpoint cut",
        resumed(all_checkpoints("adapter_model.safetensors", lambda all: all[:50])),
        4,
        ("no checkpoint verifies",),
        faults=4,
    ),
    Case(
        "R15",
        "manifests in pieces",
        resumed(all_checkpoints("MANIFEST.json", lambda all: all[:50])),
        4,
        ("no checkpoint verifies",),
        faults=4,
    ),
    Case(
        "R15",
        "manifests of another kind",
        resumed(all_checkpoints("MANIFEST.json", lambda all: b"[]")),
        4,
        ("no checkpoint verifies",),
        faults=4,
    ),
    Case(
        "R15",
        "manifests nested without end",
        resumed(all_checkpoints("MANIFEST.json", lambda all: b"[" * 100_000)),
        4,
        ("no checkpoint verifies",),
        faults=4,
    ),
    Case(
        "R15",
        "the saved plan in pieces",
        resumed(lambda place: place.text("out/plan.json", "{")),
        2,
        ("plan.json:1:2", "not JSON", "restore it"),
    ),
    Case(
        "R15",
        "the saved config in pieces",
        resumed(lambda place: place.text("out/config.yaml", "{")),
        2,
        ("config.yaml:1:2", "not valid YAML", "restore it"),
    ),
    *(
        Case(
            "R15", f"a FIFO for {name}", resumed(waiting(name)), code, (name, "is not a regular file"), writes=code == 4
        )
        for name, code in (("plan.json", 2), ("config.yaml", 2), ("trainer_log.jsonl", 4))
    ),
    *(
        Case("R16", f"resumed with another {key}", resumed(nothing, f"{key}={value}"), 2, (key, "start another run"))
        for key, value in (
            ("seed", 7),
            ("optim.lr", 0.5),
            ("batch.size", 2),
            ("adapter.rank", 8),
            ("data.max_length", 64),
        )
    ),
    Case("R16", "resumed and replaced", words("--resume", "--overwrite"), 2, ("--resume", "--overwrite")),
    Case("R17", "other data", resumed(other_data), 4, ("training data", "restore it")),
    Case(
        "R17",
        "a record more",
        resumed(lambda place: place.lines("train.json", [*ROWS, ROWS[0]])),
        4,
        ("training data", "restore it"),
    ),
    Case("R17", "another base", resumed(other_base), 4, ("base",)),
    Case(
        "R19",
        "another version of torch",
        resumed(other_libraries),
        0,
        ("continuing, but not bit for bit: torch was", "is 9.9.9"),
        writes=True,
    ),
    Case(
        "R21",
        "a run that is finished",
        lambda place: place.own_run() and ["train", place.config(), "--resume"],
        0,
        ("nothing to do",),
    ),
    Case("R26", "a tracker that is not installed", keys(report_to=["neptune"]), 2, ("report_to", "tensorboard")),
    Case("R16", "a run that has gone", lambda place: ["verify", str(place.folder / "gone")], 2, ("gone",)),
    Case("R16", "a replay of nothing", lambda place: ["replay", str(place.folder)], 2, ("",)),
]
POLICY = [
    Case("K1", "scores that are words", ppo("return ['good'] * len(prompts)"), 2, ("score.py",), writes=True),
    Case("K1", "too few scores", ppo("return [1.0]"), 2, ("score.py",), writes=True),
    Case("K1", "a function that fails", ppo("return 1 / 0"), 2, ("score.py", "division by zero"), writes=True),
    Case("K1", "a function that is not there", ppo("return []", reward="gone.py:f"), 2, ("gone.py",)),
    Case("K6", "no score at all", ppo("return []", reward=None), 2, ("ppo.reward",)),
    Case(
        "K6",
        "a policy for a reward model",
        lambda place: ppo("", reward=str(place.base))(place),
        2,
        ("base", "is not a reward model", "stage: reward"),
    ),
    Case(
        "K4", "no room for an answer", ppo("return []", max_new_tokens=64), 2, ("data.max_length", "ppo.max_new_tokens")
    ),
    Case(
        "K8",
        "another reference under the same name",
        other_reference,
        4,
        ("checkpoint-2", "alignment.reference is not what it was", "restore it"),
    ),
]
EXPORT = [
    Case(
        "E2",
        "an adapter over a narrower base",
        export("{folder}/base", "--adapter", "{folder}/out", "--merge", "--out", "{folder}/new", spoil=wider_base),
        2,
        ("base",),
    ),
    Case(
        "E4",
        "over a run",
        export("{folder}/out", "--merge", "--out", "{folder}/out"),
        2,
        ("is not empty and no export",),
    ),
    Case("E4", "over a file", export("{folder}/out", "--merge", "--out", "{folder}/train.json"), 2, ("is a file",)),
    Case(
        "E4",
        "over an export",
        export(
            "{folder}/out",
            "--merge",
            "--out",
            "{folder}/old",
            spoil=lambda place: (
                place.text("old/export.json", '{"outputs": {"model.safetensors": {}}}'),
                place.text("old/model.safetensors", "x"),
            ),
        ),
        2,
        ("old", "--overwrite"),
    ),
    Case(
        "E1",
        "where nobody writes",
        export("{folder}/out", "--merge", "--out", "/proc/surefoot"),
        3,
        ("/proc/surefoot",),
    ),
    Case("E2", "nothing there", export("{folder}/gone", "--out", "{folder}/new"), 2, ("gone",)),
    Case("E2", "a model alone", export("{base}", "--merge", "--out", "{folder}/new"), 2, ("nothing to merge",)),
]
CONFIG = [
    Case("C1", "a typo", keys(sede=3), 2, ("run.yaml:", "sede", "unknown key", "seed")),
    Case("C1", "a typo inside", keys(optim={"learning_rate": 1e-4}), 2, ("run.yaml:", "optim.learning_rate", "lr")),
    Case("C2", "a word for a number", keys(seed="three"), 2, ("run.yaml:", "seed", "whole number")),
    Case("C2", "true for a number", keys(seed=True), 2, ("run.yaml:", "seed", "whole number")),
    Case("C2", "a list for a text", keys(output=["a"]), 2, ("run.yaml:", "output")),
    Case("C2", "a number of 5000 digits", raw("seed: " + "9" * 5000 + "\n"), 2, ("run.yaml:", "digits")),
    Case("C3", "a key twice", raw("seed: 1\nseed: 2\n"), 2, ("run.yaml:", "duplicate key", "first given in line")),
    Case(
        "C4",
        "stopping early without evaluation",
        keys(early_stopping={"patience": 2}),
        2,
        ("run.yaml:", "early_stopping", "data.eval"),
    ),
    Case(
        "C4",
        "weights and epochs",
        lambda place: place.change(
            data={
                "train": [
                    {"path": str(place.folder / "train.json"), "weight": 1},
                    {"path": str(place.folder / "train.json"), "epochs": 1},
                ]
            }
        ),
        2,
        ("run.yaml:", "weight", "epochs"),
    ),
    Case("C4", "settings of another stage", keys(alignment={"beta": 0.2}), 2, ("run.yaml:", "alignment.beta", "stage")),
    *(
        Case(
            "C5", f"optim.lr {value}", raw(f"optim: {{lr: {value}}}\n"), 2, ("run.yaml:", "optim.lr", "greater than 0")
        )
        for value in (".nan", ".inf", "-1", "0", "1e999")
    ),
    *(
        Case("C5", f"{key} {value}", keys(**{group: {key: value}}), 2, ("run.yaml:", f"{group}.{key}"))
        for group, key, value in (
            ("batch", "size", 0),
            ("batch", "micro", -1),
            ("adapter", "rank", 0),
            ("adapter", "dropout", 1.5),
            ("adapter", "alpha", 0),
            ("optim", "warmup", -0.1),
            ("optim", "betas", [0.9]),
            ("data", "max_length", 7),
            ("checkpoint", "keep", 0),
        )
    ),
    Case("C5", "no length", keys(duration="soon"), 2, ("run.yaml:", "duration", "epochs")),
    Case("C5", "a length of nothing", keys(duration="0 steps"), 2, ("run.yaml:", "duration")),
    Case(
        "C6",
        "what a launcher says of precision",
        planned_with(ACCELERATE_MIXED_PRECISION="fp16"),
        0,
        ("ACCELERATE_MIXED_PRECISION", "overridden"),
    ),
    Case(
        "C6",
        "a name that nothing reads",
        planned_with(SDPA_BACKEND="flash"),
        0,
        ("SDPA_BACKEND", "ignored", "nothing reads this name"),
    ),
    Case(
        "C7",
        "a tag that runs code",
        raw("seed: !!python/object/apply:os.system ['touch marker']\n"),
        2,
        ("run.yaml:", "tag", "not supported"),
    ),
    Case("C7", "an anchor", raw("seed: &a 3\n"), 2, ("run.yaml:", "anchor", "not supported")),
    Case("C7", "a merge key", raw("<<: {seed: 3}\n"), 2, ("run.yaml:", "merge keys", "write the keys out")),
    Case("C7", "nested without end", raw("seed: " + "[" * 100_000 + "\n"), 2, ("run.yaml:", "nested")),
    Case("C7", "a second document", raw("---\nseed: 3\n"), 2, ("run.yaml:", "second document", "one per file")),
    Case("C7", "a tab", raw("optim:\n\tlr: 1\n"), 2, ("run.yaml:", "tab", "spaces")),
    Case("C7", "Latin-1", whole(b"stage: s\xe9t\n"), 2, ("run.yaml", "UTF-8")),
    Case("C7", "an empty file", whole(""), 2, ("run.yaml",)),
    Case("C7", "a list", whole("- a\n- b\n"), 2, ("run.yaml",)),
    Case("C7", "NUL", whole(b"stage: sft\0\n"), 2, ("run.yaml",)),
    Case("C7", "no such file", lambda place: ["train", str(place.folder / "rnu.yaml")], 2, ("rnu.yaml", "no such")),
    Case("C1", "an override of no key", words("optim.lrr=1"), 2, ("override optim.lrr=1", "lr")),
    Case("C1", "an override without a value", words("seed"), 2, ("seed",)),
    Case("C1", "no such command", lambda place: ["trian"], 2, ("trian", "train")),
    Case("C1", "no such flag", words("--resum"), 2, ("--resum", "--resume")),
]
CASES = [*PRECISION, *RUNTIME, *POLICY, *EXPORT, *CONFIG]
