"""`surefoot replay`: repeat what failed in a run and say whether it fails again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.terminal import echo_json, screen
from surefoot.system.errors import NOT_REPRODUCED_EXIT_CODE
from surefoot.system.messages import first_few

if TYPE_CHECKING:
    from surefoot.runs.failures.replay import Replayed
    from surefoot.runs.failures.replay_apart import TakenAgain
    from surefoot.training.diagnose import Finding


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("moved", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--plain", is_flag=True, help="Use fp32, eager attention and no kernels of surefoot.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def replay(folder: Path, moved: tuple[str, ...], plain: bool, as_json: bool) -> int:
    """Repeat the failure that FOLDER recorded. FOLDER is a failure-STEP folder of a run (a step, the making of its
    batches or an evaluation), or a run whose last process died during a step; that step is repeated in a separate
    process.

    Needs the base model and the data at the paths of the run's config, or where KEY=VALUE says they are now:
    model.path=PATH, data.train=PATH.

    Exit 0: the same value fails at the same module (the output says whether bit for bit), or the step ends its process
    again. Exit 6: it does not. Exit 2: FOLDER records no failure, or no process died in a step. Exit 4: it is damaged,
    or data or base model are not those of the run.
    """
    from surefoot.system.folders import is_run, require_failure

    own_process = is_run(folder)
    if not own_process:
        require_failure(folder)
    console = screen(err=as_json)
    if own_process:
        from surefoot.runs.failures.replay_apart import replay_run

        found = _of_death(replay_run(folder, moved=moved, plain=plain))
    else:
        from surefoot.report.library_messages import captured_libraries
        from surefoot.runs.failures.replay import replay as run_again

        with captured_libraries(console):
            found = _of_failure(run_again(folder, moved=moved, plain=plain))
    if as_json:
        echo_json(found.record)
    else:
        for caution in found.record["cautions"]:
            console.say(f"caution: {caution}", style="yellow")
        for line in found.lines:
            console.say(line)
    return 0 if found.record["same"] else NOT_REPRODUCED_EXIT_CODE


@dataclass(frozen=True)
class _Account:
    """Findings of a replay: lines to print, and the same as JSON values."""

    lines: Sequence[str]
    record: dict[str, Any]


def _account(
    found: Replayed | TakenAgain, moment: str, recorded: Sequence[str], now: str, verdict: str, record: dict[str, Any]
) -> _Account:
    """Combine the parts of a report. moment: what was repeated. recorded: lines about the original failure. now: what
    the replay saw. record: JSON values specific to this kind of replay."""
    place = "" if found.start is None else f", from {f'checkpoint-{found.start}' if found.start else 'the base model'}"
    common = {
        "plain": found.plain,
        "same": _is_same(found),
        "start": found.start,
        "error": found.error,
        "cautions": list(found.cautions),
        "verdict": verdict,
    }
    return _Account((*recorded, f"{moment}, now{place}: {now}", verdict), {**record, **common})


def _is_same(found: Replayed | TakenAgain) -> bool:
    from surefoot.runs.failures.replay_apart import TakenAgain

    return found.same if isinstance(found, TakenAgain) else found.same_place


def _of_failure(found: Replayed) -> _Account:
    then, now = found.then, found.now
    through = not found.error and now is not None and now.origin is None
    crashed = then.kind == "crash"
    known = then.finding if found.same_place else None
    seen = "it succeeds" if crashed and through else _value_words(now, found.error, found.place, known)
    recorded = [f"{then.moment}, recorded: {_value_words(then.finding, then.error, then.place)}"]
    if then.bad_weights:
        recorded.append(f"non-finite weights: {first_few(then.bad_weights, 3)}")
    elif then.largest and not crashed:
        recorded.append(str(then.largest))
    record = {
        "step": then.step,
        "kind": then.kind,
        "phase": then.phase,
        "same_bits": found.same_bits,
        "largest": asdict(then.largest) if then.largest else None,
        "then": _origin_json(then.finding),
        "now": _origin_json(now),
    }
    seen = seen if found.reached else f"in an earlier step: {seen}"
    return _account(found, then.moment, recorded, seen, _verdict(found, finite=through, crashed=crashed), record)


def _verdict(found: Replayed, *, finite: bool, crashed: bool) -> str:
    """Conclude from a replay what caused the recorded failure.

    finite: the replay succeeded.
    crashed: the recorded failure is an exception.
    """
    if found.plain:
        if finite:
            said = "succeeds" if crashed else "is finite"
            return f"with --plain (fp32) it {said}: the cause is the run's precision or a kernel, not the data"
        where = "at the same module" if found.same_place else "too, at another module"
        return f"with --plain (fp32) it fails {where}: the cause is the weights, the data or the model"
    if crashed:
        return "reproduced: the same exception at the same place" if found.same_place else "not reproduced"
    if found.same_bits:
        return "reproduced: the same value at the same module, bit for bit"
    if found.same_place:
        return "reproduced: the same module, but not bit for bit"
    if finite:
        return "not reproduced: suspect the memory, the device or a non-deterministic kernel"
    return "not reproduced: it fails at another place"


def _value_words(finding: Finding | None, error: str, place: str, known: Finding | None = None) -> str:
    """Describe the failure and its place. known: the original finding; its module name stands for modules inside it."""
    if error:
        return f"{error}, raised in {place}" if place else f"{error}, raised outside of any module's forward"
    origin = finding.origin if finding else None
    if origin is None:
        return "every value was finite"
    outer = known.origin.module if known and known.origin else ""
    inside = origin.module.removeprefix(f"{outer}.") if outer else origin.module
    name = origin.module if inside == origin.module else f"{outer} (its {inside})"
    numbers = ", ".join(map(str, origin.examples))
    return f"{origin.what_of(name)} ({origin.tensor}), in micro-batch {origin.micro_batch + 1} (examples {numbers})"


def _origin_json(finding: Finding | None) -> dict[str, Any] | None:
    return finding.origin.to_json() if finding and finding.origin else None


def _of_death(found: TakenAgain) -> _Account:
    death, trace = found.death, found.death.trace
    record = {
        "step": death.step or 0,
        "kind": "death",
        "then": {"signal": trace.signal, "line": trace.place} if trace else None,
        "told": death.error,
        "now": {"ended": found.ended, "where": found.where, "line": found.line} if found.ended else found.report,
    }
    return _account(
        found, f"step {death.step}", [str(death)], "".join(_end_words(found)), _death_verdict(found), record
    )


def _end_words(found: TakenAgain) -> Iterator[str]:
    """Describe the outcome of a repeated step in which a process had died."""
    if found.ended:
        yield f"{found.ended} {found.where}{f' ({found.line})' if found.line else ''}"
    elif found.error:
        yield _value_words(None, found.error, found.place)
    else:
        report = found.report
        assert report is not None  # because it neither died nor raised
        if report["non_finite"]:
            yield f"it completes, but its {report['non_finite'].replace('_', ' ')} is not finite"
            return
        yield "it ends"
        for name in ("loss", "grad_norm"):
            yield f", {name.replace('_', ' ')} {report[name]:.6g}" if report[name] is not None else ""
        yield f", held back: {report['held']}" if report["held"] else ""


def _death_verdict(found: TakenAgain) -> str:
    """Conclude from the repeated step why the process had died."""
    if found.same:
        if found.plain:
            return "with --plain it fails too: the cause is not a kernel of surefoot"
        return "reproduced: the step raises again" if found.error else "reproduced: the step ends its process"
    if found.ended:
        return "not reproduced: the replay did not reach the step"
    if found.error or (found.report and found.report["non_finite"]):
        return "not reproduced: the step fails, but its process survives"
    if found.plain:
        return "with --plain the process survives: if it dies without it, the cause is a kernel or the precision"
    if found.death.trace is not None or found.death.error:  # the process itself wrote it, so it was not killed
        return "not reproduced: suspect the memory, the device, another rank or a non-deterministic kernel"
    return "not reproduced: the process was killed from outside, as by the kernel (out of memory) or a job's limit"
