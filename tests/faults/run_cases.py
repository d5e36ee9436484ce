"""Bad settings, machines, run folders, rewards and exports."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from faults.data_cases import staged
from faults.place import PAIRS, PROMPTS, ROWS, Case, Place, Prepare, Words, refused
from surefoot.system import hardware


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


CHANGES = ("seed=7", "optim.lr=0.5", "batch.size=2", "adapter.rank=8", "data.max_length=64")  # of a run that goes on
CASES = [
    *refused(
        {
            "SF-OWN-FUNCTION": {
                "score.py:f": {
                    "scores that are words": ppo("return ['good'] * len(prompts)"),
                    "too few scores": ppo("return [1.0]"),
                },
                "score.py:2": {"a function that fails": ppo("return 1 / 0")},
            },
        },
        writes=True,
    ),
    *refused(
        {
            "SF-CONFIG-CONFLICT": {
                "run.yaml:13:9: precision.base": {
                    "fp16 weights that train": keys(adapter=None, precision={"base": "fp16"}),
                    "4 bits without an adapter": keys(adapter=None, precision={"base": "nf4"}),
                },
                "run.yaml:8:15: data.max_length": {"no room for an answer": ppo("return []", max_new_tokens=64)},
                "run.yaml:16:3: early_stopping": {
                    "stopping early without evaluation": keys(early_stopping={"patience": 2})
                },
                "run.yaml:9:13: data.train[0].weight": {
                    "weights and epochs": lambda place: place.change(
                        data={
                            "train": [
                                {"path": str(place.folder / "train.json"), "weight": 1},
                                {"path": str(place.folder / "train.json"), "epochs": 1},
                            ]
                        }
                    )
                },
                "run.yaml:16:9: alignment.beta": {"settings of another stage": keys(alignment={"beta": 0.2})},
            },
            "SF-CONFIG-KEY": {
                "run.yaml:16:3: precision.scaler": {"a scaler": keys(precision={"scaler": True})},
                "run.yaml:15:1": {"fp16 and bf16 as elsewhere": keys(fp16=True)},
                "run.yaml:15:1: device_map": {"device_map": keys(device_map="auto")},
                "run.yaml:15:1: sede": {"a typo": keys(sede=3)},
                "run.yaml:16:3: optim.learning_rate": {"a typo inside": keys(optim={"learning_rate": 1e-4})},
                "override optim.lrr=1: optim.lrr": {"an override of no key": words("optim.lrr=1")},
            },
            "SF-CONFIG-VALUE": {
                "run.yaml:15:12: precision.compute": {"an unknown type to compute in": keys(precision="fp8")},
                "run.yaml:16:3: report_to[0]": {"a tracker that is not installed": keys(report_to=["neptune"])},
                "run.yaml:15:7: seed": {
                    "a word for a whole number": keys(seed="three"),
                    "true for a number": keys(seed=True),
                },
                "run.yaml:15:1: output": {"a list for a text": keys(output=["a"])},
                "run.yaml:11:11: duration": {
                    "no length": keys(duration="soon"),
                    "a length of nothing": keys(duration="0 steps"),
                },
                "run.yaml:15:13: optim.lr": {
                    **{
                        f"optim.lr {value}": raw(f"optim: {{lr: {value}}}\n")
                        for value in (".nan", ".inf", "-1", "0", "1e999")
                    }
                },
                "run.yaml:10:9: batch.size": {"batch.size 0": keys(batch={"size": 0})},
                "run.yaml:11:10: batch.micro": {"batch.micro -1": keys(batch={"micro": -1})},
                "run.yaml:5:9: adapter.rank": {"adapter.rank 0": keys(adapter={"rank": 0})},
                "run.yaml:6:12: adapter.dropout": {"adapter.dropout 1.5": keys(adapter={"dropout": 1.5})},
                "run.yaml:6:10: adapter.alpha": {"adapter.alpha 0": keys(adapter={"alpha": 0})},
                "run.yaml:16:11: optim.warmup": {"optim.warmup -0.1": keys(optim={"warmup": -0.1})},
                "run.yaml:17:3: optim.betas": {"one of two betas": keys(optim={"betas": [0.9]})},
                "run.yaml:8:15: data.max_length": {"data.max_length 7": keys(data={"max_length": 7})},
                "run.yaml:14:9: checkpoint.keep": {"checkpoint.keep 0": keys(checkpoint={"keep": 0})},
            },
            "SF-FILE-MISSING": {
                "run.yaml:14:9: output": {"a file for a run folder": a_file},
                "run.yaml:17:11: ppo.reward": {"a function that is not there": ppo("return []", reward="gone.py:f")},
                "gone": {"nothing there": export("{folder}/gone", "--out", "{folder}/new")},
            },
            "SF-USE-OUTPUT": {
                "run.yaml:14:9: output": {
                    "a run is there and nothing is said of it": lambda place: place.own_run() and None,
                    "another's folder": occupied,
                    "another's folder, to be replaced": lambda place: occupied(place) or words("--overwrite")(place),
                    "another's folder, to go on in": lambda place: occupied(place) or words("--resume")(place),
                },
                "out": {"over a run": export("{folder}/out", "--merge", "--out", "{folder}/out")},
                "train.json": {"over a file": export("{folder}/out", "--merge", "--out", "{folder}/train.json")},
                "old": {
                    "over an export": export(
                        "{folder}/out",
                        "--merge",
                        "--out",
                        "{folder}/old",
                        spoil=lambda place: (
                            place.text("old/export.json", '{"outputs": {"model.safetensors": {}}}'),
                            place.text("old/model.safetensors", "x"),
                        ),
                    )
                },
            },
            "SF-FILE-UNREADABLE": {
                "out/plan.json:1:2": {
                    "the saved plan in pieces": resumed(lambda place: place.text("out/plan.json", "{"))
                },
                "out/plan.json": {"a FIFO for plan.json": resumed(waiting("plan.json"))},
            },
            "SF-CONFIG-YAML": {
                "out/config.yaml:1:2": {
                    "the saved config in pieces": resumed(lambda place: place.text("out/config.yaml", "{"))
                },
                "run.yaml:15:7": {
                    "a setting of 5000 digits": raw("seed: " + "9" * 5000 + "\n"),
                    "a tag that runs code": raw("seed: !!python/object/apply:os.system ['touch marker']\n"),
                    "an anchor": raw("seed: &a 3\n"),
                },
                "run.yaml:16:1: seed": {"a key of the config twice": raw("seed: 1\nseed: 2\n")},
                "run.yaml:15:1": {"a merge key": raw("<<: {seed: 3}\n"), "a second document": raw("---\nseed: 3\n")},
                "run.yaml:15:39": {"nested without end": raw("seed: " + "[" * 100_000 + "\n")},
                "run.yaml:16:1": {"a tab": raw("optim:\n\tlr: 1\n")},
                "run.yaml": {"an empty file": whole(""), "a list": whole("- a\n- b\n")},
                "run.yaml:1:11": {"a config with NUL": whole(b"stage: sft\0\n")},
            },
            "": {
                "--resume": {"resumed and replaced": words("--resume", "--overwrite")},
                "invalid value for 'FOLDER': Directory 'gone'": {
                    "a run that has gone": lambda place: ["verify", str(place.folder / "gone")]
                },
                "no such command: trian": {"no such command": lambda place: ["trian"]},
                "no such option '--resum'. Did you mean '--resume'? See `surefoot train --help`.": {
                    "no such flag": words("--resum")
                },
            },
            "SF-USE-FOLDER": {
                ".": {"a replay of nothing": lambda place: ["replay", str(place.folder)]},
            },
            "SF-OWN-FUNCTION": {
                "run.yaml:17:11: ppo.reward": {"no score at all": ppo("return []", reward=None)},
            },
            "SF-MODEL-KIND": {
                "base": {"a policy for a reward model": lambda place: ppo("", reward=str(place.base))(place)},
            },
            "SF-MODEL-KEYS": {
                "base/model.safetensors": {
                    "an adapter over a narrower base": export(
                        "{folder}/base",
                        "--adapter",
                        "{folder}/out",
                        "--merge",
                        "--out",
                        "{folder}/new",
                        spoil=wider_base,
                    )
                },
            },
            "SF-USE-FLAG": {
                "base": {"a model alone": export("{base}", "--merge", "--out", "{folder}/new")},
            },
            "SF-CONFIG-FILE": {
                "run.yaml:1": {"a config in Latin-1": whole(b"stage: s\xe9t\n")},
                "rnu.yaml": {"no such file": lambda place: ["train", str(place.folder / "rnu.yaml")]},
                "out/config.yaml": {"a FIFO for config.yaml": resumed(waiting("config.yaml"))},
            },
            "SF-CONFIG-OVERRIDE": {
                "override seed": {"an override without a value": words("seed")},
            },
            "SF-RESUME-CHANGED": {
                **{
                    f"override {change}: {change.partition('=')[0]}": {
                        f"resumed with {change}": resumed(nothing, change)
                    }
                    for change in CHANGES
                },
            },
        }
    ),
    *refused(
        {
            "SF-MEMORY": {
                "training": {
                    "no memory at step 3": resumed(raising(torch.OutOfMemoryError("Tried to allocate 2 GiB"), 7)),
                    "no memory for Python": resumed(raising(MemoryError(), 7)),
                },
            },
            "SF-DEVICE": {
                "training": {
                    "a device that fails at step 7": resumed(
                        raising(
                            torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more"), 7
                        )
                    )
                },
            },
        },
        exit=3,
        writes=True,
    ),
    *refused(
        {
            "SF-FILE-WRITE": {
                "/proc/surefoot-run": {"a place where nobody writes": not_writable},
                "/proc/surefoot": {"where nobody writes": export("{folder}/out", "--merge", "--out", "/proc/surefoot")},
            },
            "SF-DISK-FULL": {
                ".": {"no room for a checkpoint": small_disk},
            },
            "SF-FOLDER-BUSY": {
                "out": {"a folder in use": in_use},
            },
        },
        exit=3,
    ),
    *refused(
        {
            "SF-CHECKPOINT-DAMAGED": {
                "out/checkpoint-6/optimizer.safetensors": {
                    "every checkpoint flipped": resumed(all_checkpoints("optimizer.safetensors", flipped))
                },
                "out/checkpoint-6/adapter_model.safetensors": {
                    "every checkpoint cut": resumed(all_checkpoints("adapter_model.safetensors", lambda all: all[:50]))
                },
                "out/checkpoint-6/MANIFEST.json": {
                    "manifests in pieces": resumed(all_checkpoints("MANIFEST.json", lambda all: all[:50])),
                    "manifests of another kind": resumed(all_checkpoints("MANIFEST.json", lambda all: b"[]")),
                    "manifests nested without end": resumed(
                        all_checkpoints("MANIFEST.json", lambda all: b"[" * 100_000)
                    ),
                },
            },
        },
        exit=4,
        faults=4,
    ),
    *refused(
        {
            "SF-FILE-UNREADABLE": {
                "out/trainer_log.jsonl": {"a FIFO for trainer_log.jsonl": resumed(waiting("trainer_log.jsonl"))},
            },
        },
        exit=4,
        writes=True,
    ),
    *refused(
        {
            "SF-RESUME-CHANGED": {
                "out/checkpoint-6": {
                    "other data": resumed(other_data),
                    "a record more": resumed(lambda place: place.lines("train.json", [*ROWS, ROWS[0]])),
                },
                "base": {"another base": resumed(other_base)},
                "out/checkpoint-2": {"another reference under the same name": other_reference},
            },
        },
        exit=4,
    ),
    *refused(
        {
            "SF-DIVERGED": {
                "step 4": {
                    "a rate beyond all": keys(
                        optim={"lr": 1e30, "max_grad_norm": None, "warmup": 0.0}, adapter=None, duration="12 steps"
                    )
                },
            },
        },
        exit=5,
        writes=True,
    ),
    Case("a run is there", resumed(nothing), exit=0, writes=True),
    Case(
        "another version of torch",
        resumed(other_libraries),
        exit=0,
        shows=("is 9.9.9",),
        writes=True,
    ),
    Case(
        "a run that is finished",
        lambda place: place.own_run() and ["train", place.config(), "--resume"],
        exit=0,
        shows=("nothing to do",),
    ),
    Case(
        "what a launcher says of precision",
        planned_with(ACCELERATE_MIXED_PRECISION="fp16"),
        exit=0,
        shows=("ACCELERATE_MIXED_PRECISION", "overridden"),
    ),
    Case(
        "a name that nothing reads",
        planned_with(SDPA_BACKEND="flash"),
        exit=0,
        shows=("SDPA_BACKEND", "ignored"),
    ),
]
