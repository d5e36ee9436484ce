"""The named templates: how turns of a conversation are laid out as text.

tokenizer: the tokenizer's own chat template. llama3: the same layout as Llama 3's, for a base tokenizer that has the
tokens and no template. alpaca: Stanford's headings, one turn. plain: nothing but the texts.

llama3, alpaca and plain never write BOS: whether it is put first is the plan's choice. An answer ends with
<|eot_id|> (llama3) or EOS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surefoot.data.chat_template import make_chat_template
from surefoot.data.formats import Conversation, RowFault
from surefoot.data.segments import Segment, Template, require_turns
from surefoot.data.text_encoder import Piece, TextEncoder
from surefoot.errors import Fault, InputError

NAMES = ("tokenizer", "llama3", "alpaca", "plain")
_VERSION = 1  # of the layouts below: part of every cache key
_LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
_ALPACA_INPUT = ", paired with an input that provides further context"


def make_template(name: str, encoder: TextEncoder, stop_ids: Sequence[int]) -> Template:
    """The template called `name`, made for this tokenizer. stop_ids: tokens that end an answer, EOS first.

    InputError (data.template) when the name is unknown or the tokenizer lacks what the template needs.
    """
    if name == "tokenizer":
        return make_chat_template(encoder, stop_ids)
    if name == "llama3":
        ids = {text: number for number, text in encoder.control.items()}
        missing = [token for token in _LLAMA3_TOKENS if token not in ids]
        if missing:
            what = f"llama3 needs tokens that this tokenizer does not have: {', '.join(missing)}"
            raise InputError(Fault("data.template", what, "choose tokenizer, alpaca or plain"))
        stops = tuple(dict.fromkeys((*stop_ids, ids["<|eot_id|>"])))
        return Template(name, f"llama3 {_VERSION}", stops, _llama3)
    if name not in NAMES:
        raise InputError(Fault("data.template", f"no template is called {name!r}", f"choose from {', '.join(NAMES)}"))
    eos = _eos_text(encoder, stop_ids)
    lay_out = {"alpaca": _alpaca, "plain": _plain}[name]
    return Template(name, f"{name} {_VERSION} {eos}", tuple(stop_ids), _with_eos(lay_out, eos))


def _eos_text(encoder: TextEncoder, stop_ids: Sequence[int]) -> str:
    if not stop_ids:
        raise InputError(Fault("tokenizer", "has no end-of-sequence token, so an answer could not end"))
    text = str(encoder.tokenizer.convert_ids_to_tokens(stop_ids[0]))
    if encoder.encode([Piece(text, literal=False, opening=False)]) != [[stop_ids[0]]]:
        raise InputError(Fault("tokenizer", f"reads its own end-of-sequence token {text!r} as something else"))
    return text


def _with_eos(
    lay_out: Callable[[Conversation, str], list[Segment]], eos: str
) -> Callable[[Conversation], tuple[Segment, ...]]:
    return lambda conversation: tuple(lay_out(conversation, eos))


def _llama3(conversation: Conversation) -> tuple[Segment, ...]:
    """Llama 3's layout: a header with the role, the text without blanks around it, <|eot_id|>."""
    require_turns(conversation, "llama3")
    segments: list[Segment] = []
    for place, turn in enumerate(conversation.turns):
        answer = turn.role == "assistant"
        segments += [
            Segment(f"<|start_header_id|>{turn.role}<|end_header_id|>\n\n", place),
            Segment(turn.text.strip(), place, content=True, answer=answer),
            Segment("<|eot_id|>", place, answer=answer),
        ]
    if conversation.turns[-1].role != "assistant":
        segments.append(Segment("<|start_header_id|>assistant<|end_header_id|>\n\n", len(conversation.turns)))
    return tuple(segments)


def _alpaca(conversation: Conversation, eos: str) -> list[Segment]:
    """Stanford Alpaca's layout for one prompt and one answer. A system turn takes the place of its first sentence."""
    require_turns(conversation, "alpaca")
    *system, prompt = [turn for turn in conversation.turns if turn.role != "assistant"]
    answers = [turn for turn in conversation.turns if turn.role == "assistant"]
    if len(system) > 1 or len(answers) > 1 or any(turn.role == "user" for turn in system):
        raise RowFault("the alpaca template holds one prompt and one answer", "choose data.template llama3 or plain")
    place = len(system)
    header = Segment(_ALPACA.format(_ALPACA_INPUT if prompt.context else ""), 0)
    segments = [
        Segment(system[0].content, 0, content=True) if system else header,
        Segment("\n\n### Instruction:\n", place),
        Segment(prompt.content, place, content=True),
    ]
    if prompt.context:
        segments += [Segment("\n\n### Input:\n", place), Segment(prompt.context, place, content=True)]
    segments.append(Segment("\n\n### Response:\n", place))
    for turn in answers:
        segments += [
            Segment(turn.content, place + 1, content=True, answer=True),
            Segment(eos, place + 1, answer=True),
        ]
    return segments


def _plain(conversation: Conversation, eos: str) -> list[Segment]:
    """The texts, a line end after each prompt text, EOS after each answer. A text without turns is all answer."""
    segments: list[Segment] = []
    for place, turn in enumerate(conversation.turns):
        answer = turn.role in ("assistant", "text")
        segments.append(Segment(turn.text, place, content=True, answer=answer))
        segments.append(Segment(eos if answer else "\n", place, answer=answer))
    return segments
