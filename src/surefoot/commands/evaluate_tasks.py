"""`surefoot evaluate commonsense` (eight question sets) and `evaluate harness` (tasks of lm-evaluation-harness)."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.options import (
    argument_or_option,
    check_models,
    claim_out,
    findings_options,
    introduce,
    model_options,
    only_option,
)
from surefoot.commands.terminal import echo_json, screen

_ROWS = {"published": 8, "fast": 16}


@click.command()
@model_options
@argument_or_option("data", "Folder that holds dataset/SET/test.json or SET/test.json.", required=True)
@click.option("--sets", default="all", show_default=True, help="Comma-separated names, such as boolq,piqa.")
@click.option(
    "--mode",
    type=click.Choice(["published", "fast"]),
    default="published",
    show_default=True,
    help="published: 4 beams, 32 tokens, first match. fast: the most likely option.",
)
@click.option(
    "--template",
    default="commonsense-eval",
    show_default=True,
    help="The published prompt, the name of a template, or trained: the template of training.",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Questions per forward pass.  [default: 8; fast: 16]")
@click.option("--max-samples", type=click.IntRange(min=1), help="Only the first N records of each set.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the result files.  [default: experiment; fast: experiment-fast]",
)
@click.option("--model-label", help="Name of MODEL in files and tables, if there is an adapter.")
@click.option("--label", help="Name of the adapter, or of a model without one, in files and tables.")
@only_option
@click.option("--overwrite", is_flag=True, help="Discard existing answers and start again.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON; progress goes to stderr.")
def commonsense(
    model: str,
    adapter: str | None,
    data: str,
    sets: str,
    mode: str,
    template: str,
    batch_size: int | None,
    max_samples: int | None,
    out: Path | None,
    model_label: str | None,
    label: str | None,
    only: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Measure MODEL's accuracy on boolq, piqa, social_i_qa, hellaswag, winogrande, ARC-Easy, ARC-Challenge and
    openbookqa, and compare it with the published numbers of LoRA and DoRA.

    Writes OUT/<model>-<adapter>-<set>.json after every batch; the same command continues an interrupted evaluation.
    """
    from surefoot.evaluate.commonsense.protocol import TRAINED, choose_sets, read_set
    from surefoot.methods.requests import require_template
    from surefoot.system import durable
    from surefoot.system.folders import require_file_name

    for flag, name in (("--model-label", model_label), ("--label", label)):
        if name is not None:
            require_file_name(flag, name)
    chosen = choose_sets(sets)
    check_models(model, adapter, only=only)
    if template != TRAINED:
        require_template(template)
    for one in chosen:
        read_set(Path(data), one, max_samples)
    out = out or Path("experiment" if mode == "published" else "experiment-fast")
    durable.require_writable(out)

    from surefoot.evaluate.commonsense.evaluation import CommonsenseRequest, evaluate_commonsense, template_caution
    from surefoot.evaluate.commonsense.files import summary_file
    from surefoot.evaluate.commonsense.report import cautions, found_to_json, score_rows
    from surefoot.methods.open_model import open_for_use
    from surefoot.report.pictures.plots import png
    from surefoot.report.tables.evaluation import draw_scores, score_table

    opened = open_for_use(model, adapter)
    otherwise = template_caution(opened, template)
    introduce(opened, *([f"caution: {otherwise}"] if otherwise else ()), template=False)
    whole = opened.trained == opened.base
    requested = CommonsenseRequest(
        Path(data),
        chosen,
        out,
        mode=mode,  # pyright: ignore[reportArgumentType]
        rows=batch_size or _ROWS[mode],
        max_samples=max_samples,
        template=template,
        names=(model_label or label, None) if whole else (model_label, label),
        overwrite=overwrite,
        only=only,  # pyright: ignore[reportArgumentType]
    )
    console = screen(err=as_json)
    found = evaluate_commonsense(opened, requested, model=model, adapter=adapter, say=console.say)
    rows, headings = score_rows(found, chosen), [one.label for one in chosen]
    summary = summary_file(out, found.labels)
    as_plain = found_to_json(found, requested)
    durable.write_json(summary, as_plain)
    chance = {one.label: one.chance for one in chosen}
    picture = summary.with_suffix(".png")
    durable.write_bytes(picture, png(draw_scores(rows, headings, chance, f"{summary.stem}, {mode}")))
    if as_json:
        echo_json(as_plain)
        return
    console.show(score_table(rows, headings))
    for caution in cautions(found, requested):
        console.say(f"caution: {caution}")
    console.say(f"wrote {summary} and {picture}")


@click.command()
@model_options
@argument_or_option("tasks", "Comma-separated task names.", required=True)
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with your own task YAML files. Runs the Python files that they name.",
)
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Examples before each question.  [default: the task's]")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N documents of each task.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences per forward pass."
)
@click.option("--apply-chat-template", is_flag=True, help="Format questions with the tokenizer's chat template.")
@only_option
@findings_options("harness.json and harness.png")
def harness(
    model: str,
    adapter: str | None,
    tasks: str,
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    batch_size: int,
    apply_chat_template: bool,
    only: str | None,
    as_json: bool,
    out: Path | None,
    overwrite: bool,
) -> None:
    """Run tasks of lm-evaluation-harness on MODEL, built-in ones or those of a folder.

    Needs the extra `eval`: pip install 'surefoot[eval]'. Runs offline if the tasks' data are on this machine.
    """
    from surefoot.evaluate.harness.needs import require_harness, task_names
    from surefoot.system import durable

    check_models(model, adapter, only=only)
    names = task_names(tasks)
    request = {
        "model": model,
        "adapter": adapter,
        "tasks": tasks,
        "include_path": None if include_path is None else str(include_path),
        "num_fewshot": num_fewshot,
        "limit": limit,
        "apply_chat_template": apply_chat_template,
        "only": only,
    }
    if out is not None:
        claim_out(out / "harness.json", request, overwrite, pictures=["harness.png"])
    require_harness()

    import json

    from surefoot.evaluate.harness.tasks import HarnessRequest, known_tasks, metrics_of, run_harness, share_rows
    from surefoot.methods.open_model import open_for_use
    from surefoot.report.pictures.plots import png
    from surefoot.report.tables.evaluation import draw_scores, harness_table

    requested = HarnessRequest(
        names,
        include_path,
        limit,
        num_fewshot,
        batch_size,
        apply_chat_template,
        only,  # pyright: ignore[reportArgumentType]
    )
    manager = known_tasks(requested)
    opened = open_for_use(model, adapter)
    introduce(opened, template=False)
    found = run_harness(opened, requested, manager)
    as_plain = {"model": model, "adapter": adapter, "opened": opened.described, "limit": limit, "sides": found}
    if out is not None:
        durable.make_folders(out)
        kept = json.dumps({"asked": request, **as_plain}, indent=2, ensure_ascii=False, default=str)
        durable.write_text(out / "harness.json", f"{kept}\n")
        rows, shares = share_rows(found)
        if shares:
            durable.write_bytes(out / "harness.png", png(draw_scores(rows, shares, {}, "lm-evaluation-harness")))
    if as_json:
        echo_json(as_plain, default=str)
        return
    console = screen()
    if limit is not None:
        console.say(f"caution: only the first {limit} documents of each task")
    console.show(harness_table({side: metrics_of(one) for side, one in found.items()}))
