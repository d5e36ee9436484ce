"""`surefoot replay`: run again what went wrong in a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.commands.terminal import echo_json, screen
from surefoot.system.errors import NOT_REPRODUCED_EXIT_CODE

if TYPE_CHECKING:
    from surefoot.report.tables.replay import ReplayTable


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
        found = _of_death(folder, moved, plain)
    else:
        from surefoot.report.library_messages import captured_libraries

        with captured_libraries(console):
            found = _of_failure(folder, moved, plain)
    if as_json:
        echo_json(found.to_json())
    else:
        for caution in found.cautions:
            console.say(f"caution: {caution}", style="yellow")
        for line in found.lines():
            console.say(line)
    return 0 if found.same else NOT_REPRODUCED_EXIT_CODE


def _of_failure(folder: Path, moved: tuple[str, ...], plain: bool) -> ReplayTable:
    from dataclasses import asdict

    from surefoot.report.tables.replay import ReplayTable, origin_json, value_words, verdict, weights_then
    from surefoot.runs.failures.replay import replay as run_again

    found = run_again(folder, moved=moved, plain=plain)
    then, now = found.then, found.now
    through = not found.error and now is not None and now.origin is None
    crashed = then.kind == "crash"
    known = then.finding if found.same_place else None
    seen = "it goes through" if crashed and through else value_words(now, found.error, found.place, known)
    recorded = f"{then.moment}, recorded: {value_words(then.finding, then.error, then.place)}"
    return ReplayTable(
        moment=then.moment,
        step=then.step,
        kind=then.kind,
        plain=plain,
        same=found.same_place,
        start=found.start,
        then=(recorded, *weights_then(then.bad_weights, None if crashed else then.largest)),
        now=seen if found.reached else f"in a step before it: {seen}",
        verdict=verdict(
            same_place=found.same_place, same_bits=found.same_bits, plain=plain, finite=through, crashed=crashed
        ),
        error=found.error,
        cautions=found.cautions,
        more={
            "phase": then.phase,
            "same_bits": found.same_bits,
            "largest": asdict(then.largest) if then.largest else None,
            "then": origin_json(then.finding),
            "now": origin_json(now),
        },
    )


def _of_death(run: Path, moved: tuple[str, ...], plain: bool) -> ReplayTable:
    from surefoot.report.tables.replay import ReplayTable, death_verdict, end_words
    from surefoot.runs.failures.replay_apart import replay_run

    found = replay_run(run, moved=moved, plain=plain)
    death, trace = found.death, found.death.trace
    return ReplayTable(
        moment=f"step {death.step}",
        step=death.step or 0,
        kind="death",
        plain=plain,
        same=found.same,
        start=found.start,
        then=(str(death),),
        now=end_words(found.ended, found.where, found.line, found.error, found.place, found.report),
        verdict=death_verdict(
            same=found.same,
            ended=bool(found.ended),
            raised=bool(found.error),
            wrong=bool(found.error) or bool(found.report and found.report["non_finite"]),
            plain=plain,
            traced=trace is not None or bool(death.error),
        ),
        error=found.error,
        cautions=found.cautions,
        more={
            "then": {"signal": trace.signal, "line": trace.place} if trace else None,
            "told": death.error,
            "now": {"ended": found.ended, "where": found.where, "line": found.line} if found.ended else found.report,
        },
    )
