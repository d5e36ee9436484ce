"""`surefoot replay`: run a step again that went wrong."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.cli.printing import echo, echo_json
from surefoot.errors import NOT_REPRODUCED_EXIT_CODE


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("moved", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--plain", is_flag=True, help="In fp32, attention written out, no kernel of surefoot's own.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def replay(folder: Path, moved: tuple[str, ...], plain: bool, as_json: bool) -> int:
    """Run the step again that FOLDER, a failure-STEP of a run, records; or that in which the last process of FOLDER, a
    run, died without a word, in a process of its own.

    The base model and the data are needed, under the paths of the run's config, or where KEY=VALUE says that they lie
    now: model.path=PATH, data.train=PATH.

    Exit 0: the same value goes wrong at the same module, bit for bit or not is said; or the step ends its process
    again. Exit 6: it does not. Exit 2: FOLDER records no failure, or no process of it died in a step. Exit 4: it is
    damaged, or data or base model are not those of the run.
    """
    from surefoot.made_folders import is_run, require_failure

    if is_run(folder):
        return _replay_run(folder, moved, plain, as_json)
    require_failure(folder)

    import sys

    from surefoot import process
    from surefoot.report.capture import captured_libraries
    from surefoot.report.console import open_console
    from surefoot.report.tables.replay import bad_weights, origin_json, value_words, verdict
    from surefoot.stages.failures.replay import replay as run_again

    console = open_console(sys.stderr if as_json else sys.stdout, process.terminal_wishes())
    with captured_libraries(console):
        found = run_again(folder, moved=moved, plain=plain)
    then, now = found.then, found.now
    said = verdict(
        same_place=found.same_place,
        same_bits=found.same_bits,
        plain=plain,
        finite=not found.error and now is not None and now.origin is None,
        crashed=then.kind == "crash",
    )
    if as_json:
        told = {
            "step": then.step,
            "kind": then.kind,
            "plain": plain,
            "same_place": found.same_place,
            "same_bits": found.same_bits,
            "then": origin_json(then.finding),
            "now": origin_json(now),
            "error": found.error,
            "cautions": list(found.cautions),
            "verdict": said,
        }
        echo_json(told)
    else:
        for caution in found.cautions:
            console.say(f"caution: {caution}", style="yellow")
        console.say(f"step {then.step}, recorded: {value_words(then.finding, then.error, then.place)}")
        for line in bad_weights(then.bad_weights):
            console.say(line)
        console.say(f"step {then.step}, now: {value_words(now, found.error, found.place)}")
        console.say(said)
    return 0 if found.same_place else NOT_REPRODUCED_EXIT_CODE


def _replay_run(run: Path, moved: tuple[str, ...], plain: bool, as_json: bool) -> int:
    from surefoot.report.tables.replay import death_verdict, end_words
    from surefoot.stages.failures.replay_apart import replay_run

    found = replay_run(run, moved=moved, plain=plain)
    ended = end_words(found.ended, found.where, found.line, found.error, found.place, found.report)
    said = death_verdict(
        same=found.same,
        ended=bool(found.ended),
        raised=bool(found.error),
        wrong=bool(found.error) or bool(found.report and found.report["non_finite"]),
        plain=plain,
        traced=found.death.trace is not None or bool(found.death.told),
    )
    step = found.death.step
    if as_json:
        trace = found.death.trace
        told = {
            "step": step,
            "kind": "death",
            "plain": plain,
            "start": found.start,
            "same": found.same,
            "then": {"signal": trace.signal, "line": trace.place} if trace else None,
            "told": found.death.told,
            "now": {"ended": found.ended, "where": found.where, "line": found.line} if found.ended else found.report,
            "error": found.error,
            "cautions": list(found.cautions),
            "verdict": said,
        }
        echo_json(told)
    else:
        for caution in found.cautions:
            echo(f"caution: {caution}")
        echo(str(found.death))
        echo(f"step {step}, now, from {f'checkpoint-{found.start}' if found.start else 'the base model'}: {ended}")
        echo(said)
    return 0 if found.same else NOT_REPRODUCED_EXIT_CODE
