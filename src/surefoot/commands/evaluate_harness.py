"""`surefoot evaluate harness`: tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.answering import check_models, claim_out, introduce, model_options, said_either_way
from surefoot.commands.printing import echo_json


@click.command()
@model_options
@said_either_way("tasks", "Names of tasks, with commas between them.", required=True)
@click.option(
    "--include-path",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder of task YAML files of your own. Python files that they name are run.",
)
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Examples before each question.  [default: the task's]")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many documents of each task.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences at once.")
@click.option("--apply-chat-template", is_flag=True, help="Ask through the tokenizer's chat template.")
@click.option("--only", type=click.Choice(["base", "adapter"]), help="Leave the other one out.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write harness.json and .png here.")
@click.option("--overwrite", is_flag=True, help="Replace findings of another request in --out.")
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
    """Tasks of lm-evaluation-harness on MODEL, its own or those of a folder.

    Needs the extra `eval`: pip install 'surefoot[eval]'. With data on this machine it runs offline.
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
    import sys

    from surefoot.evaluate.harness.tasks import HarnessRequest, known_tasks, metrics_of, run_harness, share_rows
    from surefoot.methods.open_model import open_for_use
    from surefoot.report.console import open_console
    from surefoot.report.pictures.plots import png
    from surefoot.report.tables.evaluation import draw_scores, harness_table
    from surefoot.system import process

    asked = HarnessRequest(
        names,
        include_path,
        limit,
        num_fewshot,
        batch_size,
        apply_chat_template,
        only,  # pyright: ignore[reportArgumentType]
    )
    manager = known_tasks(asked)
    opened = open_for_use(model, adapter)
    introduce(opened, template=False)
    found = run_harness(opened, asked, manager)
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
    console = open_console(sys.stdout, process.terminal_wishes())
    if limit is not None:
        console.say(f"caution: the first {limit} documents of each task alone")
    console.show(harness_table({side: metrics_of(one) for side, one in found.items()}))
