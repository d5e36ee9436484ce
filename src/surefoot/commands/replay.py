"""`surefoot replay`: run again what went wrong in a run, and say whether it goes wrong again."""

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
@click.option("--plain", is_flag=True, help="In fp32, attention written out, no kernel of surefoot's own.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def replay(folder: Path, moved: tuple[str, ...], plain: bool, as_json: bool) -> int:
    """Run again what FOLDER, a failure-STEP of a run, records: a step, the making of its batches, or an evaluation; or
    the step in which the last process of FOLDER, a run, died without a word, in a process of its own.

    The base model and the data are needed, under the paths of the run's config, or where KEY=VALUE says that they lie
    now: model.path=PATH, data.train=PATH.

    Exit 0: the same value goes wrong at the same module, bit for bit or not is said; or the step ends its process
    again. Exit 6: it does not. Exit 2: FOLDER records no failure, or no process of it died in a step. Exit 4: it is
    damaged, or data or base model are not those of the run.
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
    """What a replay found: lines for people, and the same as plain values."""

    lines: Sequence[str]
    record: dict[str, Any]


def _account(
    found: Replayed | TakenAgain, moment: str, recorded: Sequence[str], now: str, verdict: str, record: dict[str, Any]
) -> _Account:
    """moment: what was run again. recorded: lines on what had gone wrong. now: what was seen. record: what only this
    kind of replay has to say."""
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
    seen = "it goes through" if crashed and through else _value_words(now, found.error, found.place, known)
    recorded = [f"{then.moment}, recorded: {_value_words(then.finding, then.error, then.place)}"]
    if then.bad_weights:
        recorded.append(f"weights that were not finite: {first_few(then.bad_weights, 3)}")
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
    seen = seen if found.reached else f"in a step before it: {seen}"
    return _account(found, then.moment, recorded, seen, _verdict(found, finite=through, crashed=crashed), record)


def _verdict(found: Replayed, *, finite: bool, crashed: bool) -> str:
    """What the replay of a recorded failure says of its cause.

    finite: the replay went through.
    crashed: what was recorded is an exception.
    """
    if found.plain:
        if finite:
            said = "goes through" if crashed else "is finite"
            return (
                f"by the plain path in fp32 it {said}: the precision or a kernel of the run is to blame, not the data"
            )
        where = "at the same module" if found.same_place else "too, elsewhere"
        return f"by the plain path in fp32 it goes wrong {where}: the weights, the data or the model are to blame"
    if crashed:
        return "reproduced: the same exception at the same place" if found.same_place else "not reproduced"
    if found.same_bits:
        return "reproduced: the same value at the same module, bit for bit"
    if found.same_place:
        return "reproduced: the same module, with other bits"
    if finite:
        return "not reproduced: suspect the memory, the device or a kernel that does not repeat itself"
    return "not reproduced: it goes wrong elsewhere"


def _value_words(finding: Finding | None, error: str, place: str, known: Finding | None = None) -> str:
    """What went wrong, where. known: what goes wrong at the same module, whose name stands for those inside of it."""
    if error:
        return f"{error}, raised in {place}" if place else f"{error}, raised in no module's forward pass"
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
    """Of a step in which a process died, taken again."""
    if found.ended:
        yield f"{found.ended} {found.where}{f' ({found.line})' if found.line else ''}"
    elif found.error:
        yield _value_words(None, found.error, found.place)
    else:
        report = found.report
        assert report is not None  # it neither died nor raised
        if report["non_finite"]:
            yield f"it ends, and its {report['non_finite'].replace('_', ' ')} is not finite"
            return
        yield "it ends"
        for name in ("loss", "grad_norm"):
            yield f", {name.replace('_', ' ')} {report[name]:.6g}" if report[name] is not None else ""
        yield f", held back: {report['held']}" if report["held"] else ""


def _death_verdict(found: TakenAgain) -> str:
    """What taking the step again, in which a process died, says of the cause."""
    if found.same:
        if found.plain:
            return "by the plain path it goes wrong too: no kernel of surefoot's own is to blame"
        return "reproduced: the step raises again" if found.error else "reproduced: the step ends its process"
    if found.ended:
        return "not reproduced: the replay did not come to the step"
    if found.error or (found.report and found.report["non_finite"]):
        return "not reproduced: the step goes wrong, and its process lives"
    if found.plain:
        return "by the plain path the step lives: where it dies without --plain, a kernel or the precision is to blame"
    if found.death.trace is not None or found.death.error:  # of the process itself, so nobody else ended it
        return "not reproduced: suspect the memory, the device, another rank or a kernel that does not repeat itself"
    return "not reproduced: somebody else ended the process, as the kernel does when memory runs out, or a job's limit"
