"""What a replay found, in a few lines or as plain values: of a failure folder, or of a process that died."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.system.messages import first_few

if TYPE_CHECKING:
    from surefoot.training.diagnose import Finding, Origin
    from surefoot.training.failure import Largest


@dataclass(frozen=True)
class ReplayTable:
    """What a replay found.

    moment: what was run again, in words.
    kind: of what is recorded.
    same: it goes wrong again, as it did.
    start: the step of the checkpoint from which steps were taken again, 0 for the base model, None where none were.
    then: lines on what is recorded.
    now: what was found.
    error: the exception of now.
    more: what else a script wants to know, as plain values.
    """

    moment: str
    step: int
    kind: str
    plain: bool
    same: bool
    start: int | None
    then: Sequence[str]
    now: str
    verdict: str
    error: str
    cautions: Sequence[str]
    more: Mapping[str, Any]

    def lines(self) -> Iterator[str]:
        """Those that follow the cautions."""
        yield from self.then
        place = "" if self.start is None else f", from {f'checkpoint-{self.start}' if self.start else 'the base model'}"
        yield f"{self.moment}, now{place}: {self.now}"
        yield self.verdict

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "kind": self.kind,
            "plain": self.plain,
            "same": self.same,
            "start": self.start,
            **self.more,
            "error": self.error,
            "cautions": list(self.cautions),
            "verdict": self.verdict,
        }


def value_words(finding: Finding | None, error: str, place: str, known: Finding | None = None) -> str:
    """What went wrong, where. known: what goes wrong at the same module, whose name stands for those inside of it."""
    if error:
        return f"{error}, raised in {place}" if place else f"{error}, raised in no module's forward pass"
    origin = finding.origin if finding else None
    if origin is None:
        return "every value was finite"
    return _of(origin, known.origin.module if known and known.origin else "")


def verdict(*, same_place: bool, same_bits: bool, plain: bool, finite: bool, crashed: bool) -> str:
    """What the replay of a recorded failure says of its cause.

    finite: the replay went through.
    crashed: what was recorded is an exception.
    """
    if plain:
        if finite:
            said = "goes through" if crashed else "is finite"
            return (
                f"by the plain path in fp32 it {said}: the precision or a kernel of the run is to blame, not the data"
            )
        where = "at the same module" if same_place else "too, elsewhere"
        return f"by the plain path in fp32 it goes wrong {where}: the weights, the data or the model are to blame"
    if crashed:
        return "reproduced: the same exception at the same place" if same_place else "not reproduced"
    if same_bits:
        return "reproduced: the same value at the same module, bit for bit"
    if same_place:
        return "reproduced: the same module, with other bits"
    if finite:
        return "not reproduced: suspect the memory, the device or a kernel that does not repeat itself"
    return "not reproduced: it goes wrong elsewhere"


def end_words(ended: str, where: str, line: str, error: str, place: str, report: Mapping[str, Any] | None) -> str:
    """Of a step in which a process died, taken again. See `surefoot.runs.failures.replay_apart.TakenAgain`."""
    if ended:
        return f"{ended} {where}{f' ({line})' if line else ''}"
    if error:
        return value_words(None, error, place)
    assert report is not None
    if report["non_finite"]:
        return f"it ends, and its {report['non_finite'].replace('_', ' ')} is not finite"
    numbers = [
        f"{name.replace('_', ' ')} {report[name]:.6g}" for name in ("loss", "grad_norm") if report[name] is not None
    ]
    return ", ".join(["it ends", *numbers]) + (f", held back: {report['held']}" if report["held"] else "")


def death_verdict(*, same: bool, ended: bool, raised: bool, wrong: bool, plain: bool, traced: bool) -> str:
    """What taking the step again, in which a process died, says of the cause.

    same: the step ends its process again, or raises as it did.
    ended: the replay's process died, in the step or before it.
    wrong: an exception, or a value that is not finite.
    traced: something of the run's process ended it, and not somebody else.
    """
    if same:
        if plain:
            return "by the plain path it goes wrong too: no kernel of surefoot's own is to blame"
        return "reproduced: the step raises again" if raised else "reproduced: the step ends its process"
    if ended:
        return "not reproduced: the replay did not come to the step"
    if wrong:
        return "not reproduced: the step goes wrong, and its process lives"
    if plain:
        return "by the plain path the step lives: where it dies without --plain, a kernel or the precision is to blame"
    if traced:
        return "not reproduced: suspect the memory, the device, another rank or a kernel that does not repeat itself"
    return "not reproduced: somebody else ended the process, as the kernel does when memory runs out, or a job's limit"


def weights_then(bad: tuple[str, ...], largest: Largest | None) -> Iterator[str]:
    """A line on the weights that were not finite; where all were, on the largest."""
    if bad:
        yield f"weights that were not finite: {first_few(bad, 3)}"
    elif largest:
        yield str(largest)


def origin_json(finding: Finding | None) -> dict[str, Any] | None:
    return finding.origin.to_json() if finding and finding.origin else None


def _of(origin: Origin, known: str) -> str:
    numbers = ", ".join(str(number) for number in origin.examples)
    inside = origin.module.removeprefix(f"{known}.") if known else origin.module
    name = origin.module if inside == origin.module else f"{known} (its {inside})"
    return f"{origin.what_of(name)} ({origin.tensor}), in micro-batch {origin.micro_batch + 1} (examples {numbers})"
