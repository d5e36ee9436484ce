"""`surefoot generate`: answers on stdout, model information on stderr; and `surefoot chat`, a conversation."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.options import check_answers, introduce, model_options, sampling_options
from surefoot.commands.terminal import echo, echo_json
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    from surefoot.data.formats import Turn
    from surefoot.methods.open_model import OpenModel, Question
    from surefoot.models.generate import Decoding


_TOGETHER = 8  # prompts per batch


@click.command()
@model_options
@click.option("--prompt", "prompts", multiple=True, help="A prompt; repeat the option for several.")
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Prompts, one per line.")
@click.option("--image", "images", multiple=True, metavar="FILE", help="A picture to show with each prompt.")
@click.option("--system", help="System text before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the plain text, without a chat template.")
@sampling_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per answer.")
def generate(
    model: str,
    adapter: str | None,
    prompts: tuple[str, ...],
    file: Path | None,
    images: tuple[str, ...],
    system: str | None,
    raw: bool,
    max_new_tokens: int | None,
    seed: int,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer prompts with MODEL: a base model, an adapter, a run, a checkpoint or a merged model.

    Prompts come from --prompt, --file or stdin, one per line. They are formatted as in training. Pictures go before the
    prompt, or where it says <image>.
    """
    if raw and images:
        raise click.UsageError("--raw cannot be combined with --image, which needs a chat template")
    if raw and system:
        raise click.UsageError("--raw cannot be combined with --system, which needs a chat template")
    if prompts and file:
        raise click.UsageError("give prompts by --prompt or by --file, not both")
    texts = list(prompts) or _lines(file)
    if not texts:
        raise click.UsageError("no prompt given: use --prompt, --file or a pipe")

    check_answers(model, adapter, max_new_tokens)

    from surefoot.data.formats import Turn
    from surefoot.methods.open_model import Question, open_for_use, question_of, raw_ids, room_for
    from surefoot.models.generate import generate_answers

    opened = open_for_use(model, adapter)
    introduce(opened, template=not raw)
    before = [Turn("system", system)] if system else []
    questions = [
        Question(raw_ids(opened, text)) if raw else question_of(opened, [*before, _about(images, text)])
        for text in texts
    ]
    room_for(opened, [one.ids for one in questions], max_new_tokens)  # fail before the first answer
    together = 1 if images else _TOGETHER
    for start in range(0, len(texts), together):
        batch = [one.ids for one in questions[start : start + together]]
        with opened.context():
            answers = generate_answers(
                opened.model,
                opened.tokenizer,
                batch,
                max_new_tokens=room_for(opened, batch, max_new_tokens),
                stop_ids=opened.template.stop_ids,
                pad_id=opened.pad_id,
                seed=seed + start,
                pictures=questions[start].pictures,
                **sampling,
            )
        for text, answer in zip(texts[start:], answers, strict=False):
            if as_json:
                tokens = len(answer.ids)
                found = {"prompt": text, "answer": answer.text, "stopped": answer.stopped, "tokens": tokens}
                echo_json(found, indent=None)
            else:
                echo(answer.text if len(texts) == 1 else f"> {text}\n{answer.text}\n")


def _about(images: Sequence[str], text: str) -> Turn:
    """A user turn with these pictures, placed before the text or at its <image> marks. Raises UsageError if the numbers
    of marks and pictures differ."""
    from surefoot.data.formats import IMAGE, Turn
    from surefoot.data.formats.conversation import MARK

    if not images:
        return Turn("user", text)
    if (places := text.count(MARK)) not in (0, len(images)):
        raise click.UsageError(f"the prompt has {places} {MARK} marks for {len(images)} pictures")
    content = text.replace(MARK, IMAGE) if places else IMAGE * len(images) + text
    return Turn("user", content, images=tuple(images))


def _lines(file: Path | None) -> list[str]:
    """Prompts from the file or a pipe, without blank lines."""
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


_IMAGE = "/image "
_HINT = "/help lists the commands; /exit or Ctrl-D ends the chat"
_COMMAND = re.compile(r"/[A-Za-z]+\s*")  # one word only, so that a path is not taken for a command
_HELP = """\
/image FILE  attach a picture to the next message
/reset       forget the conversation, keep the system text
/exit        end the chat; /quit and Ctrl-D do the same
/help        show this
Ctrl-C       stop the current answer
Everything else is sent to the model. Start a line with a space to send a /word."""


@click.command()
@model_options
@click.option("--system", help="System text at the start of the conversation.")
@sampling_options
def chat(
    model: str, adapter: str | None, system: str | None, max_new_tokens: int | None, seed: int, **sampling: Any
) -> None:
    """Talk to MODEL: a base model, an adapter, a run, a checkpoint or a merged model.

    Answers appear as they are written. On a pipe, every line is a turn and only answers are printed.
    """
    check_answers(model, adapter, max_new_tokens)

    from surefoot.data.formats import Turn
    from surefoot.methods.open_model import open_for_use, room_for
    from surefoot.models.generate import Decoding

    opened = open_for_use(model, adapter)
    introduce(opened, *([_HINT] if sys.stdin.isatty() else []))
    start = [Turn("system", system)] if system else []
    turns = list(start)
    images: list[str] = []
    for number, line in enumerate(_typed_lines()):
        if line.strip() in ("/exit", "/quit"):
            return
        if line.strip() == "/help":
            echo(_HELP, err=True)
            continue
        if line.strip() == "/reset":
            turns = list(start)
            echo("the conversation was reset", err=True)
            continue
        if line.startswith(_IMAGE):
            images.append(line.removeprefix(_IMAGE).strip())
            continue
        if _COMMAND.fullmatch(line):
            echo(
                f"unknown command {line.strip()}; {_HINT}; start the line with a space to send it to the model",
                err=True,
            )
            continue
        try:
            turns, question = _with_question(opened, start, turns, _about(images, line))
            room = room_for(opened, [question.ids], max_new_tokens)
        except (InputError, click.UsageError) as error:
            turns, images = list(start), []
            echo(f"{error}; the conversation was reset", err=True)
            continue
        # A new seed for each turn, so that a repeated question can get a different answer.
        decoding = Decoding(room, opened.template.stop_ids, opened.pad_id, seed=seed + number, **sampling)
        images = []
        turns.append(Turn("assistant", _print_answer(opened, question, decoding)))


def _with_question(
    opened: OpenModel, start: list[Turn], turns: list[Turn], question: Turn
) -> tuple[list[Turn], Question]:
    """Append a question to the conversation. A single-turn template (alpaca) drops the earlier turns."""
    from surefoot.methods.open_model import question_of

    try:
        return [*turns, question], question_of(opened, [*turns, question])
    except InputError as error:
        if turns == start:
            raise
        echo(f"{error.faults[0].what}: each line is a new conversation", err=True)
        return [*start, question], question_of(opened, [*start, question])


def _typed_lines() -> Iterator[str]:
    """Yield the user's non-blank lines until the end of input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        return
    while True:
        try:
            line = input("> ")
        except EOFError:
            echo()
            return
        if line.strip():
            yield line


def _print_answer(opened: OpenModel, question: Question, decoding: Decoding) -> str:
    """Print the answer while it is generated, and return it; Ctrl-C stops it."""
    from surefoot.models.generate import stream_text

    pieces: list[str] = []
    try:
        with opened.context():
            for piece in stream_text(opened.model, opened.tokenizer, question.ids, decoding, question.pictures):
                echo(piece, nl=False)
                pieces.append(piece)
    except KeyboardInterrupt:
        echo(" …", nl=False)
    echo()
    return "".join(pieces)
