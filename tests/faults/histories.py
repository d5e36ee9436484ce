"""What a run folder goes through, small: checkpoints of a model that trains in microseconds, saved in every way there
is. Each action is given a folder in which `checkpoint-1` (and where it says so, more) is good."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from helpers.toy_model import settings, toy_batches, toy_engine, toy_examples, toy_loss
from surefoot.system import durable
from surefoot.system.errors import IntegrityError
from surefoot.training import checkpoint as checkpoints
from surefoot.training.background import background_writer
from surefoot.training.checkpoint import (
    begin_checkpoint,
    clear_rejected,
    load_carried,
    load_state,
    newest_verified,
    retain,
    set_aside_newer,
)
from surefoot.training.engine import SingleEngine
from surefoot.training.state import RunState
from surefoot.training.step import train_step


@cache
def engine_after(step: int) -> SingleEngine:
    """The same each time it is asked, and another after each step."""
    engine = toy_engine()
    for number in range(1, step + 1):
        train_step(
            engine, toy_loss, toy_batches(toy_examples(6), 3), step=number, lr=0.1, scale=None, settings=settings()
        )
    return engine


def save(run: Path, step: int, *, beside: bool = False, evaluated: int = 0) -> None:
    """As the loop's `save` does, retention included. evaluated: tells two checkpoints of one step apart."""
    engine = engine_after(step)

    def write_model(folder: Path) -> None:
        checkpoints.save_file(dict(engine.model.state_dict()), folder / "model.safetensors")
        (folder / "tokenizer").mkdir()
        durable.fill_json(folder / "tokenizer" / "config.json", {"a": 1})

    with begin_checkpoint(
        run,
        engine,
        RunState(step=step, evaluated=evaluated),
        trainer_state={"global_step": step},
        identity={"data": "d"},
        carried={"average": torch.full((2,), float(step))},
    ) as pending:
        assert pending.folder is not None
        write_model(pending.folder)

    def finish() -> Path:
        folder = pending.finish()
        retain(run, keep=2, best_step=None)
        return folder

    with background_writer(0 if beside else 1 << 40) as writer:
        if writer.take(finish, pending.size) is None:
            writer.finished(wait=True)


@dataclass(frozen=True)
class History:
    """prepare: what is in the folder before; act: what is interrupted. allowed: (step, evaluated) of what may be loaded
    after an interruption, the last one once it is done."""

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    allowed: tuple[tuple[int, int], ...]


def _spoiled(run: Path) -> None:
    """Checkpoint 3 does not verify, and the run went on from 2 before: it is aside already."""
    for step in (1, 2, 3):
        save(run, step)
    (run / "checkpoint-3" / checkpoints.STATE).write_text("{}")
    set_aside_newer(run, 2)
    save(run, 3)
    (run / "checkpoint-3" / checkpoints.STATE).write_text("{}")


def _go_on(run: Path) -> None:
    set_aside_newer(run, 2)
    save(run, 3, evaluated=3)
    clear_rejected(run)


def _half_replaced(run: Path) -> None:
    """A kill fell between the two renames of a replacement."""
    save(run, 1)
    save(run, 2)
    (run / "checkpoint-2").rename(run / ".replaced-checkpoint-2")


HISTORIES = {
    "first": History(lambda run: save(run, 1), lambda run: save(run, 2), ((1, 0), (2, 0))),
    "beside the steps": History(lambda run: save(run, 1), lambda run: save(run, 2, beside=True), ((1, 0), (2, 0))),
    "retention": History(lambda run: [save(run, step) for step in (1, 2)], lambda run: save(run, 3), ((2, 0), (3, 0))),
    "again": History(
        lambda run: [save(run, step) for step in (1, 2)],
        lambda run: save(run, 2, evaluated=2),
        ((2, 0), (2, 2)),
    ),
    "over a bad one": History(_spoiled, _go_on, ((2, 0), (3, 3))),
    "putting back": History(_half_replaced, lambda run: save(recovered(run), 3), ((2, 0), (3, 0))),
}


def recovered(run: Path) -> Path:
    """What a resumed run does first."""
    durable.make_folders(run)
    durable.restore_replaced(run)
    durable.clear_temporary(run)
    return run


def loaded(run: Path) -> tuple[int, int] | None:
    """(step, evaluated) of what is loaded, after a comparison of every tensor with what was saved; None where there is
    no checkpoint. Raises AssertionError on a wrong load."""
    recovered(run)
    found, _ = newest_verified(run)
    if found is None:
        return None
    state, moments = load_state(found)
    weights = checkpoints.load_file(found.folder / "model.safetensors")
    engine = engine_after(found.step)
    assert state.step == found.step
    assert same(weights, dict(engine.model.state_dict())), "weights of another step were loaded"
    assert same(moments, engine.gather_state()), "moments of another step were loaded"
    assert same(load_carried(found), {"average": torch.full((2,), float(found.step))})
    return state.step, state.evaluated


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def outcome(run: Path, history: History) -> str:
    """After an interruption: "" where the older or the newer checkpoint is loaded, else what is wrong."""
    try:
        found = loaded(run)
    except (AssertionError, IntegrityError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if found in history.allowed else f"loaded {found}, not one of {history.allowed}"
