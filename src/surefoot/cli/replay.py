"""`surefoot replay`: run a step again that went wrong."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.cli.printing import echo_json
from surefoot.errors import NOT_REPRODUCED_EXIT_CODE


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("moved", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--plain", is_flag=True, help="In fp32, attention written out, no kernel of surefoot's own.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def replay(folder: Path, moved: tuple[str, ...], plain: bool, as_json: bool) -> int:
    """Run the step again that FOLDER, a failure-STEP of a run, records.

    The base model and the data are needed, under the paths of the run's config, or where KEY=VALUE says that they lie
    now: model.path=PATH, data.train=PATH.

    Exit 0: the same value goes wrong at the same module; bit for bit or not is said. Exit 6: it does not. Exit 2:
    FOLDER records no failure. Exit 4: it is damaged, or data or base model are not those of the run.
    """
    from surefoot.made_folders import require_failure

    require_failure(folder)

    import sys

    from surefoot import process
    from surefoot.report.capture import captured_libraries
    from surefoot.report.console import open_console
    from surefoot.report.replay_view import bad_weights, origin_json, value_words, verdict
    from surefoot.stages.replay import replay as run_again

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
