"""`surefoot evaluate loss`: how well a model predicts the answers of a data set."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.answering import check_models, claim_out, introduce, model_options, said_either_way
from surefoot.commands.printing import echo_json


@click.command()
@model_options
@said_either_way("data", "Data as in data.train.", required=True)
@click.option("--template", help="Lay the records out with this template.  [default: as the model was trained]")
@click.option("--max-length", type=click.IntRange(min=2), help="Cut examples at so many tokens.")
@click.option("--max-samples", type=click.IntRange(min=1), help="Use only the first so many records.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="Examples per forward pass; changes no more than rounding."
)
@click.option("--only", type=click.Choice(["base", "adapter"]), help="Leave the other one out.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write loss.json into this folder.")
@click.option("--overwrite", is_flag=True, help="Replace a loss.json of another request in --out.")
def loss(
    model: str,
    adapter: str | None,
    data: str,
    template: str | None,
    max_length: int | None,
    max_samples: int | None,
    batch_size: int | None,
    only: str | None,
    as_json: bool,
    out: Path | None,
    overwrite: bool,
) -> None:
    """Loss, perplexity and token accuracy of MODEL on DATA, over the tokens that training would learn.

    DATA is what `data.train` takes: a file, a folder, a hub data set, or a mapping such as '{path: data, name: demo}'.
    For a run and its evaluation file the loss is the eval_loss of the run.
    """
    from surefoot.methods.requests import DataRequest, check_request
    from surefoot.system import durable

    asked = DataRequest(data, template, max_length, max_samples)
    check_models(model, adapter, only=only, max_length=max_length)
    check_request(asked)
    request = {"model": model, "adapter": adapter, **vars(asked), "only": only}
    if out is not None:
        claim_out(out / "loss.json", request, overwrite)

    import sys

    from surefoot.evaluate.measure_loss import as_evaluated, loss_to_json, measure_loss
    from surefoot.methods.open_model import open_for_use
    from surefoot.report.console import open_console
    from surefoot.report.tables.evaluation import loss_lines, loss_table
    from surefoot.system import process

    opened = as_evaluated(open_for_use(model, adapter))
    introduce(opened, template=False)
    with open_console(sys.stderr, process.terminal_wishes()).passing() as show:
        measured = measure_loss(opened, asked, rows=batch_size, only=only, tell=show)  # pyright: ignore[reportArgumentType]
    found = {"model": model, "adapter": adapter, "opened": opened.described, **loss_to_json(measured)}
    if out is not None:
        durable.make_folders(out)
        durable.write_json(out / "loss.json", {"asked": request, **found})
    if as_json:
        echo_json(found)
        return
    console = open_console(sys.stdout, process.terminal_wishes())
    for line in loss_lines(measured.audit, measured.results, measured.max_length):
        console.say(line)
    console.show(loss_table(measured.results))
