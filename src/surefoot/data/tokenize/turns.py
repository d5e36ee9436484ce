"""What an environment says between two answers of a model, as token ids in the template's own marks.

    answer ids, as the model drew them | after_answer(...) | next answer, as the model draws it

The ids are those that a conversation of training has between two answers: the template lays out a question, an answer
and what follows, and of its runs (`segments.encode_runs`) the one behind the answer is taken. The answer itself is a
stand-in: what a model drew is never decoded and encoded again, since other tokens may spell the same text
(trl#5224, verl#6501).

What is said before the first answer is put behind the prompt's own text, in front of the marks that end the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.formats.conversation import ToolCall
from surefoot.data.tokenize.segments import Piece, Template, TextEncoder, encode_runs, prompt_ids
from surefoot.system.errors import Fault, InputError

_QUESTION, _OTHER, _ANSWER = Turn("user", "Q"), Turn("user", "7"), "A"
_FIRST_CALL = "000000000"  # id of a conversation's first call, see `surefoot.data.chat.render.call_ids`
_FIX = "give environment another role, or choose another data.template"


@dataclass(frozen=True)
class TurnMarks:
    """A template and its tokenizer."""

    template: Template
    encoder: TextEncoder
    bos_id: int | None

    def after_answer(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Ids from the end of an answer to where the model begins the next one.

        turns: of the roles user or tool.

        Raises InputError if the template cannot write them there.
        """
        results = [turn for turn in turns if turn.role == "tool"]
        calls = tuple(ToolCall(turn.tool or "tool", {}) for turn in results)
        answer = Turn("assistant", "" if calls else _ANSWER, calls=calls)
        conversation = Conversation((_QUESTION, answer, *turns))
        try:
            (runs,) = encode_runs([self.template.segments(conversation)], self.encoder, self.bos_id)
        except RowFault as fault:
            raise self._fault(fault.what) from None
        last = max(place for place, run in enumerate(runs) if run.answer)
        ids = tuple(number for run in runs[last + 1 :] for number in run.ids)
        if ids[:1] and ids[0] in self.template.stop_ids:
            raise self._fault("the template ends an answer in another way once something follows")
        if results and any(_FIRST_CALL in one.text for run in runs[last + 1 :] for one in run.segments):
            raise self._fault("the template writes a call's id beside its result, and a drawn call has another")
        return ids

    def before_answer(self, prompt: Sequence[int], text: str) -> tuple[int, ...]:
        """The prompt's ids with a text behind the user's own, after a blank line. Raises InputError if the template's
        marks cannot be told from what the user says."""
        one, other = (
            prompt_ids(Conversation((turn,)), self.template, self.encoder, self.bos_id) for turn in (_QUESTION, _OTHER)
        )
        pairs = zip(one[::-1], other[::-1], strict=False)
        size = next(number for number, (own, its) in enumerate(pairs) if own != its)
        end = len(prompt) - size
        if tuple(prompt[end:]) != tuple(one[len(one) - size :]):
            raise self._fault("what stands behind a prompt cannot be told from its text")
        (said,) = self.encoder.encode([Piece(f"\n\n{text}", literal=True, opening=False)])
        return (*prompt[:end], *said, *prompt[end:])

    def _fault(self, what: str) -> InputError:
        what = f"{self.template.name}: {what}, so an environment has no place to speak"
        return InputError(Fault("data.template", what, _FIX, "SF-ENVIRONMENT"))
