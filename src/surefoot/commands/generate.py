"""`surefoot generate`: answers on stdout, one line about the model on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from surefoot.commands.answering import check_answers, introduce, model_options, sampling_options
from surefoot.commands.printing import echo, echo_json
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    from surefoot.models.generate import Generated

_TOGETHER = 8  # prompts per batch


@click.command()
@model_options
@click.option("--prompt", "prompts", multiple=True, help="A prompt; repeat it for several.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Prompts, one per line.")
@click.option("--system", help="System text before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@sampling_options
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

    check_answers(model, adapter, max_new_tokens)

    from surefoot.data.formats import Turn
    from surefoot.methods.open_model import conversation_ids, open_for_use, raw_ids, room_for
    from surefoot.models.generate import Decoding, generate_answers

    opened = open_for_use(model, adapter)
    introduce(opened, template=not raw)
    before = [Turn("system", system)] if system else []
    ids = [raw_ids(opened, text) if raw else conversation_ids(opened, [*before, Turn("user", text)]) for text in texts]
    room_for(opened, ids, max_new_tokens)  # all prompts are checked before the first is answered
    for start in range(0, len(texts), _TOGETHER):
        batch = ids[start : start + _TOGETHER]
        decoding = Decoding(
            max_new_tokens=room_for(opened, batch, max_new_tokens),
            stop_ids=opened.template.stop_ids,
            pad_id=opened.pad_id,
            temperature=temperature,
            top_p=top_p,
            seed=seed + start,
        )
        with opened.context():
            answers = generate_answers(opened.model, opened.tokenizer, batch, **vars(decoding))
        for text, answer in zip(texts[start:], answers, strict=False):
            if as_json:
                echo_json(_record(text, answer), indent=None)
            else:
                echo(_as_text(text, answer, alone=len(texts) == 1))


def _record(prompt: str, answer: Generated) -> dict[str, object]:
    return {"prompt": prompt, "answer": answer.text, "stopped": answer.stopped, "tokens": len(answer.ids)}


def _as_text(prompt: str, answer: Generated, alone: bool) -> str:
    return answer.text if alone else f"> {prompt}\n{answer.text}\n"


def _lines(file: Path | None) -> list[str]:
    """Prompts from the file or a pipe; blank lines are skipped."""
    if file is None and sys.stdin.isatty():
        return []
    data = file.read_bytes() if file else sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            Fault(
                str(file or "stdin"), f"not UTF-8 at byte {error.start}", "save it as UTF-8", code="SF-FILE-UNREADABLE"
            )
        ) from None
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
