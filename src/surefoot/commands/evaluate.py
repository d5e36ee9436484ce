"""`surefoot evaluate`: the group of measurements, and three of them: loss, reward, norms.

A measurement's module is imported when its command is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from surefoot.commands.main import Entry, LazyGroup
from surefoot.commands.options import (
    argument_or_option,
    bos_option,
    check_models,
    claim_out,
    findings_options,
    introduce,
    model_options,
    only_option,
    records_options,
)
from surefoot.commands.terminal import echo_json, screen
from surefoot.system.errors import Fault, InputError

MEASUREMENTS = {
    "loss": Entry("surefoot.commands.evaluate", "Loss, perplexity and token accuracy on a file."),
    "answers": Entry(
        "surefoot.commands.evaluate_answers", "Reward and pass@k of answers; the best ones as training data."
    ),
    "reward": Entry("surefoot.commands.evaluate", "How well a reward model ranks pairs of answers."),
    "commonsense": Entry("surefoot.commands.evaluate_tasks", "Eight question sets, compared with published numbers."),
    "harness": Entry("surefoot.commands.evaluate_tasks", "Tasks of lm-evaluation-harness, offline ones included."),
    "norms": Entry("surefoot.commands.evaluate", "Norms of activations, attention on the first token, by layer."),
}

evaluate = LazyGroup(
    MEASUREMENTS,
    name="evaluate",
    help="Measure MODEL: a base model, an adapter, a run, a checkpoint or a merged model. "
    "With an adapter, the base is measured too.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@click.command()
@model_options
@argument_or_option("data", "Data as in data.train.", required=True)
@records_options
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="Examples per forward pass; only rounding depends on it."
)
@only_option
@findings_options("loss.json")
def loss(
    model: str,
    adapter: str | None,
    data: str,
    batch_size: int | None,
    only: str | None,
    as_json: bool,
    out: Path | None,
    overwrite: bool,
    **layout: Any,
) -> None:
    """Measure loss, perplexity and token accuracy of MODEL on DATA, over the tokens that training would learn.

    DATA is what `data.train` takes: a file, a folder, a hub data set, or a mapping such as '{path: data, name: demo}'.
    For a run and its evaluation file, the loss equals the run's eval_loss.
    """
    from surefoot.methods.requests import DataRequest, check_request
    from surefoot.system import durable

    requested = DataRequest(data, **layout)
    check_models(model, adapter, only=only, max_length=requested.max_length)
    check_request(requested)
    request = {"model": model, "adapter": adapter, **vars(requested), "only": only}
    if out is not None:
        claim_out(out / "loss.json", request, overwrite)

    from surefoot.evaluate.loss import as_evaluated, loss_to_json, measure_loss
    from surefoot.methods.open_model import open_for_use
    from surefoot.report.tables.evaluation import loss_lines, loss_table

    opened = as_evaluated(open_for_use(model, adapter))
    introduce(opened, template=False)
    with screen(err=True).passing() as show:
        measured = measure_loss(opened, requested, rows=batch_size, only=only, on_progress=show)  # pyright: ignore[reportArgumentType]
    found = {"model": model, "adapter": adapter, "opened": opened.described, **loss_to_json(measured)}
    if out is not None:
        durable.make_folders(out)
        durable.write_json(out / "loss.json", {"asked": request, **found})
    if as_json:
        echo_json(found)
        return
    console = screen()
    for line in loss_lines(measured.audit, measured.results, measured.max_length):
        console.say(line)
    console.show(loss_table(measured.results))


@click.command()
@model_options
@argument_or_option("data", "Pairs, as in data.train.  [default: the run's held-out pairs]")
@records_options
@click.option("--batch-size", type=click.IntRange(min=1), help="Pairs per forward pass; only rounding depends on it.")
@findings_options("reward.json and calibration.png")
def reward(
    model: str,
    adapter: str | None,
    data: str | None,
    batch_size: int | None,
    as_json: bool,
    out: Path | None,
    overwrite: bool,
    **layout: Any,
) -> None:
    """Measure accuracy, margin, mean scores and calibration of the reward model MODEL on the pairs in DATA.

    MODEL is a run of stage reward, one of its checkpoints, or a reward model of another tool. DATA is what `data.train`
    takes: preference records with a better and a worse answer. By default it is the run's held-out pairs.
    """
    from surefoot.methods.requests import DataRequest, check_request
    from surefoot.system import durable

    check_models(model, adapter, max_length=layout["max_length"])
    if data is not None:
        requested = DataRequest(data, **layout)
        check_request(requested)
    elif adapter is not None or any(layout.values()):
        what = "is needed with --adapter, --template, --max-length or --max-samples"
        raise InputError(
            Fault("DATA", what, "without these options the run's held-out pairs are used", code="SF-USE-FLAG")
        )
    else:
        requested = None
    request = {"model": model, "adapter": adapter, "source": data, **layout}
    if out is not None:
        claim_out(out / "reward.json", request, overwrite, pictures=["calibration.png"])

    from surefoot.evaluate.loss import as_evaluated
    from surefoot.evaluate.reward import measure_reward, reward_to_json
    from surefoot.methods.open_reward import open_reward
    from surefoot.report.calibration import calibration_bins, calibration_picture
    from surefoot.report.pictures.plots import png
    from surefoot.report.tables.evaluation import calibration_table, reward_lines

    opened = open_reward(model, adapter)
    evaluated = as_evaluated(opened.opened)
    introduce(evaluated, template=False)
    with screen(err=True).passing() as show:
        measured = measure_reward(opened, requested, pairs=batch_size, on_progress=show)
    found = {"model": model, "adapter": adapter, "opened": evaluated.described, **reward_to_json(measured)}
    if out is not None:
        durable.make_folders(out)
        durable.write_json(out / "reward.json", {"asked": request, **found})
        durable.write_bytes(out / "calibration.png", png(calibration_picture(measured.sums, f"{model}: calibration")))
    if as_json:
        echo_json(found)
        return
    console = screen()
    for line in reward_lines(measured.audit, found):
        console.say(line)
    if measured.ranking.caution:
        console.say(f"caution: {measured.ranking.caution}", style="yellow")
    console.show(calibration_table(calibration_bins(measured.sums)))


@click.command()
@model_options
@argument_or_option("data", "Data as in data.train.  [default: a built-in text]")
@click.option("--template", help="Template for --data.  [default: as the model was trained]")
@bos_option
@click.option(
    "--max-samples", type=click.IntRange(min=1), default=32, show_default=True, help="Number of texts to measure."
)
@click.option("--generate-samples", is_flag=True, help="Also answer three fixed prompts with base and adapter.")
@findings_options("norms.json and pictures")
def norms(
    model: str,
    adapter: str | None,
    data: str | None,
    template: str | None,
    as_json: bool,
    out: Path | None,
    overwrite: bool,
    **measured: Any,
) -> None:
    """Measure norms of MODEL's activations and RMSNorms by layer, first position compared with the rest, and the
    attention on the first position. With an adapter, the base is measured too.
    """
    from surefoot.methods.requests import DataRequest, check_request, norms_request

    if template is not None and data is None:
        raise click.UsageError("--template needs --data")
    check_models(model, adapter)
    if data is not None:
        check_request(DataRequest(data, template))
    request = norms_request(model, adapter, data, template, **measured)
    if out is not None:
        claim_out(out / "norms.json", request, overwrite)

    from surefoot.evaluate.norms import measure_model_norms, norms_to_json, results_to_json
    from surefoot.report.pictures.norms import layer_table, norm_table

    found = measure_model_norms(
        model, adapter=adapter, data=data, template=template, out=out, overwrite=overwrite, **measured
    )
    introduce(found.opened, template=False)
    if as_json:
        echo_json(norms_to_json(found, model, adapter))
        return
    console = screen()
    report = next(iter(found.reports.values()))
    console.say(f"{report.texts} texts, {report.tokens} tokens ({found.origin})")
    console.show(layer_table(results_to_json(found)))
    console.say()
    console.show(norm_table(results_to_json(found)))
    for sample in found.samples:
        console.say()
        for side, text in sample.items():
            console.say(f"{side}: {text}")
    if out is not None:
        console.say(f"in {out}: norms.json, {', '.join(found.pictures)}")
