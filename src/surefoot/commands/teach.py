"""`surefoot teach`: store a teacher's distributions for stage distill."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.options import config_arguments, load_or_exit
from surefoot.commands.terminal import screen
from surefoot.system.messages import counted, size_text


@click.command()
@config_arguments
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option(
    "--top", type=click.IntRange(min=1), default=64, show_default=True, help="Likeliest tokens stored at each position."
)
def teach(config: Path, overrides: tuple[str, ...], out: Path, top: int) -> None:
    """Run the teacher of CONFIG.yaml (stage distill) over its data once, and store what it says in a folder.

    Name the folder as distill.teacher: runs then need neither the teacher nor its memory. It fits this data with this
    tokenizer, template and data.max_length; for others it is refused.
    """
    loaded = load_or_exit(config, overrides).config

    from surefoot.commands.data import plan_tokens
    from surefoot.models.folder import resolve_folder
    from surefoot.planning.notes import Notes
    from surefoot.runs.make_plan import require_distillation
    from surefoot.runs.teaching import teach as run_teach

    console, notes = screen(), Notes()
    folder = resolve_folder(loaded.model.path, loaded.model.revision, weights=False)
    require_distillation(loaded, folder)
    tokens = plan_tokens(loaded, folder, notes)
    with console.passing() as show:
        facts = run_teach(loaded, tokens, out, top, say=console.say, on_progress=show)
    for caution in notes.cautions:
        console.say(f"caution: {caution}", style="yellow")
    size = sum(file.stat().st_size for file in out.iterdir())
    examples = counted(facts.examples, "example")
    console.say(f"{out}: {examples}, {facts.tokens:,} learned tokens, {top} tokens each, {size_text(size)}")
    console.say(f"next: surefoot train {config} distill.teacher={out}")
