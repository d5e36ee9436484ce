"""`surefoot evaluate reward`: how well a reward model ranks pairs of answers."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.answering import check_models, claim_out, introduce, model_options, said_either_way
from surefoot.commands.printing import echo_json
from surefoot.system.errors import Fault, InputError


@click.command()
@model_options
@said_either_way("data", "Pairs, as in data.train.  [default: those that the run held out]")
@click.option("--template", help="Lay the records out with this template.  [default: as the model was trained]")
@click.option("--max-length", type=click.IntRange(min=2), help="Cut examples at so many tokens.")
@click.option("--max-samples", type=click.IntRange(min=1), help="Use only the first so many records.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Pairs per forward pass; changes no more than rounding.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write reward.json and calibration.png into this folder.",
)
@click.option("--overwrite", is_flag=True, help="Replace a reward.json of another request in --out.")
def reward(
    model: str,
    adapter: str | None,
    data: str | None,
    template: str | None,
    max_length: int | None,
    max_samples: int | None,
    batch_size: int | None,
    as_json: bool,
    out: Path | None,
    overwrite: bool,
) -> None:
    """Accuracy, margin, mean scores and calibration of the reward model MODEL on the pairs in DATA.

    MODEL is a run of stage reward, one of its checkpoints, or a reward model of another tool. DATA is what `data.train`
    takes: preference records with a better and a worse answer. Left out, it is the pairs that the run held out.
    """
    from surefoot.methods.requests import DataRequest, check_request
    from surefoot.system import durable

    words = {"source": data, "template": template, "max_length": max_length, "max_samples": max_samples}
    check_models(model, adapter, max_length=max_length)
    if data is not None:
        asked = DataRequest(data, template, max_length, max_samples)
        check_request(asked)
    elif adapter is not None or any(words.values()):
        what = "is needed with --adapter, --template, --max-length or --max-samples"
        raise InputError(Fault("DATA", what, "without these a run's own held-out pairs are taken", code="SF-USE-FLAG"))
    else:
        asked = None
    request = {"model": model, "adapter": adapter, **words}
    if out is not None:
        claim_out(out / "reward.json", request, overwrite, pictures=["calibration.png"])

    import sys

    from surefoot.evaluate.measure_loss import as_evaluated
    from surefoot.evaluate.measure_reward import measure_reward, reward_to_json
    from surefoot.methods.open_model import open_reward
    from surefoot.report.calibration import calibration_bins, calibration_picture
    from surefoot.report.console import open_console
    from surefoot.report.pictures.plots import png
    from surefoot.report.tables.evaluation import calibration_table, reward_lines
    from surefoot.system import process

    opened = open_reward(model, adapter)
    asked_as = as_evaluated(opened.opened)
    introduce(asked_as, template=False)
    with open_console(sys.stderr, process.terminal_wishes()).passing() as show:
        measured = measure_reward(opened, asked, pairs=batch_size, tell=show)
    found = {"model": model, "adapter": adapter, "opened": asked_as.described, **reward_to_json(measured)}
    if out is not None:
        durable.make_folders(out)
        durable.write_json(out / "reward.json", {"asked": request, **found})
        durable.write_bytes(out / "calibration.png", png(calibration_picture(measured.sums, f"{model}: calibration")))
    if as_json:
        echo_json(found)
        return
    console = open_console(sys.stdout, process.terminal_wishes())
    for line in reward_lines(measured.audit, found):
        console.say(line)
    if measured.ranking.caution:
        console.say(f"caution: {measured.ranking.caution}", style="yellow")
    console.show(calibration_table(calibration_bins(measured.sums)))
