"""`surefoot data`: show what the model would learn from, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.commands.options import config_arguments, load_or_exit
from surefoot.commands.terminal import echo_json, screen

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig
    from surefoot.planning.notes import Notes
    from surefoot.planning.plan import TokenizerPlan


@click.command()
@config_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the audit as JSON, in the format of data.json.")
def data(config: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what CONFIG.yaml would train on: counts, what was cut or dropped, and samples with the learned part marked.

    Needs the model's config.json and tokenizer files, but no weights and no GPU. The tokenized data stay in the cache,
    where `surefoot train` finds them.
    """
    loaded = load_or_exit(config, overrides)

    from surefoot.methods.examples import prepare_examples
    from surefoot.models.folder import resolve_folder
    from surefoot.planning.notes import Notes
    from surefoot.report.data_audit import audit_to_json
    from surefoot.report.tables.audit import audit_report
    from surefoot.runs.load_models import planned_tokenizer

    model = loaded.config.model
    folder, notes = resolve_folder(model.path, model.revision, weights=False), Notes()
    tokens = plan_tokens(loaded.config, folder, notes)
    prepared = prepare_examples(loaded.config, tokens, planned_tokenizer(folder, tokens))
    if as_json:
        echo_json(audit_to_json(prepared), allow_nan=False)
        return
    console = screen()
    console.show(audit_report(prepared))
    for caution in notes.cautions:
        console.say(f"caution: {caution}", style="yellow")


def plan_tokens(config: RunConfig, folder: Path, notes: Notes) -> TokenizerPlan:
    """Plan only the tokenizer, so that data of a run for another machine can be shown here."""
    from surefoot.families.tokenizer_facts import read_tokenizer_facts
    from surefoot.models.facts import facts_of
    from surefoot.planning.tokenizer import plan_tokenizer
    from surefoot.system.errors import InputError

    tokens = plan_tokenizer(config, facts_of(folder), read_tokenizer_facts(folder), notes)
    if notes.faults:
        raise InputError(notes.faults)
    return tokens
