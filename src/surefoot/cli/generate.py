"""`surefoot generate`: answers on stdout, one line about the model on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

import click

_TOGETHER = 8  # prompts per batch


@click.command()
@click.argument("model")
@click.option("--adapter", help="An adapter folder to put over MODEL.")
@click.option("--prompt", "prompts", multiple=True, help="A prompt; repeat it for several.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Prompts, one per line.")
@click.option("--system", help="System text before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Longest answer in tokens.  [default: up to 256]")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0: most likely token."
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    show_default=True,
    help="Sample from the likeliest tokens that add up to this.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Other seeds, other samples.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per answer.")
def generate(
    model: str,
    adapter: str | None,
    prompts: tuple[str, ...],
    file: Path | None,
    system: str | None,
    raw: bool,
    max_new_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int,
    as_json: bool,
) -> None:
    """Answer prompts with MODEL: a base model, an adapter, a run, a checkpoint or a merged model.

    Prompts come from --prompt, --file, or else from stdin, one per line. They are laid out as in training.
    """
    if raw and system:
        raise click.UsageError("--raw takes no --system: there is no template to put it into")
    if prompts and file:
        raise click.UsageError("give prompts by --prompt or by --file, not both")
    texts = list(prompts) or _lines(file)
    if not texts:
        raise click.UsageError("there is no prompt: use --prompt, --file or a pipe")

    import json

    from surefoot.data.formats import Turn
    from surefoot.models.generate import generate_answers
    from surefoot.stages.open_model import conversation_ids, open_for_use, raw_ids, room_for

    opened = open_for_use(model, adapter)
    click.echo(opened.described if not raw else opened.described.partition(", template")[0], err=True)
    before = [Turn("system", system)] if system else []
    ids = [raw_ids(opened, text) if raw else conversation_ids(opened, [*before, Turn("user", text)]) for text in texts]
    room_for(opened, ids, max_new_tokens)  # all prompts are checked before the first is answered
    for start in range(0, len(texts), _TOGETHER):
        batch = ids[start : start + _TOGETHER]
        with opened.context():
            answers = generate_answers(
                opened.model,
                opened.tokenizer,
                batch,
                max_new_tokens=room_for(opened, batch, max_new_tokens),
                stop_ids=opened.template.stop_ids,
                pad_id=opened.pad_id,
                temperature=temperature,
                top_p=top_p,
                seed=seed + start,
            )
        for text, answer in zip(texts[start:], answers, strict=False):
            if as_json:
                record = {"prompt": text, "answer": answer.text, "stopped": answer.stopped, "tokens": len(answer.ids)}
                click.echo(json.dumps(record, ensure_ascii=False))
            else:
                click.echo(answer.text if len(texts) == 1 else f"> {text}\n{answer.text}\n")


def _lines(file: Path | None) -> list[str]:
    """Prompts from the file or a pipe; blank lines are skipped."""
    if file is None and sys.stdin.isatty():
        return []
    text = file.read_text(encoding="utf-8") if file else sys.stdin.read()
    return [line for line in text.splitlines() if line.strip()]
