"""Answers in several turns: the policy draws one, the environment answers, until one of them or a limit ends it.

    prompt | drawn, given, drawn, given, drawn

The ids are concatenated and never made from text again: drawn ids stay as they were drawn, and what the environment
says is tokenized in the template's marks (`TurnMarks`). The next turn is drawn after exactly these ids, and the same
ids are trained on, with a loss on the drawn ones only. Each turn draws from a stream of its own, a function of seed,
place and turn.

An answer ends where the environment says done; where a turn has no end (`max_new_tokens`), or what the environment says
leaves no room for another token; and after `turns` turns. Only the first is an end, the others are limits.

A call that fails (it raises, takes too long, or gives a reward that is not finite) is repeated once in a new episode,
to which the earlier turns are replayed. If that fails too, the answer has no score: it is not trained on, and is
counted. If this happens to all answers of a step's rollout, on all ranks, the run ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from surefoot.data.batching.batch import RecordName
from surefoot.data.tokenize.turns import TurnMarks
from surefoot.methods.environments.calls import Call, Late, in_time
from surefoot.methods.environments.opened import Environment, Episode
from surefoot.methods.environments.recorded import Kept, Recorded, key_of
from surefoot.methods.environments.replies import Lost, Reply, total
from surefoot.methods.method import Notify
from surefoot.methods.rewards.answers import LOST, Score, scored
from surefoot.methods.waiting import WaitReporter
from surefoot.models.generate import Decoding
from surefoot.models.rollout import Rollout, Rollouts
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.messages import first_few

ENVIRONMENT = "environment"  # its name among the rewards
_TRIES = 2  # of a call
_REPEATED, _LOST = "environment_repeated", tuple(f"environment_{outcome}" for outcome in LOST)
_TURNS, _OVER_TURNS, _OVER_TOKENS = "turns", "over_turns", "over_tokens"
_SUMS = (_TURNS, _OVER_TURNS, _OVER_TOKENS, _REPEATED, *_LOST)


class _Changed(Exception):
    """An environment does not answer as it did before."""


@dataclass
class _Seat:
    """Place of an episode, filled by the thread that makes it."""

    episode: Episode | None = None

    def close(self) -> None:
        if self.episode is not None:
            self.episode.close()


@dataclass
class _Chat:
    """One answer while it is made.

    place: its index among those of all ranks.
    prompt: with what the environment said at the start.
    room: most tokens of the response.
    said, heard: the turns that were answered, and the replies; of the start as well, so there is one more of them.
    lost: the call because of which it has no score.
    """

    place: int
    record: Mapping[str, Any]
    name: RecordName
    seed: int
    prompt: tuple[int, ...]
    room: int
    response: tuple[int, ...] = ()
    pieces: list[int] = field(default_factory=list)
    logprobs: tuple[float, ...] | None = ()
    kept: tuple[tuple[int, ...], ...] | None = ()
    said: list[str] = field(default_factory=list)
    heard: list[Reply] = field(default_factory=list)
    seat: _Seat = field(default_factory=_Seat)
    goes_on: bool = True
    stopped: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    lost: Lost | None = None

    def end(self, *, limit: str = "") -> None:
        self.goes_on, self.stopped = False, not limit
        if limit:
            self.counts[limit] += 1

    def draw(self, turn: Rollout) -> None:
        self.response += turn.response
        self.pieces.append(len(turn.response))
        self.logprobs = None if self.logprobs is None or turn.logprobs is None else self.logprobs + turn.logprobs
        self.kept = None if self.kept is None or turn.kept is None else self.kept + turn.kept
        self.counts[_TURNS] += 1

    def give(self, ids: tuple[int, ...]) -> None:
        self.response += ids
        self.pieces.append(len(ids))

    @property
    def rollout(self) -> Rollout:
        pieces = tuple(self.pieces) if len(self.pieces) > 1 else ()
        return Rollout(self.prompt, self.response, self.stopped, self.logprobs or None, self.kept or None, pieces)

    @property
    def score(self) -> Score:
        if self.lost is not None:
            return Score(math.nan, self.lost.what, self.lost.outcome)
        return scored(total(self.heard), "; ".join(one.reason for one in self.heard if one.reason))


@dataclass(frozen=True)
class TurnRequest:
    """What is to be answered: of this rank's prompts, in lists of equal length.

    prompts: ids.
    records: of the data.
    names: of the records, for messages.
    seeds: the environment's, equal for all answers to a prompt.
    places: index of each answer among those of all ranks.
    """

    prompts: Sequence[tuple[int, ...]]
    records: Sequence[Mapping[str, Any]]
    names: Sequence[RecordName]
    seeds: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True)
class TurnAnswers:
    """The answers; where an environment was asked, also its scores, its texts between the turns of each answer, and
    sums over the answers of `_SUMS`."""

    answers: Sequence[Rollout]
    scores: Sequence[Score] = ()
    given: Sequence[Sequence[str]] = ()
    sums: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MultiTurn:
    """Makes answers in turns.

    turns: most turns of the policy.
    seconds: for one answer of the environment.
    anywhere: whether something is true of any rank's answers. Collective.
    """

    environment: Environment
    marks: TurnMarks
    tokenizer: PreTrainedTokenizerBase
    turns: int
    seconds: float
    recorded: Recorded
    anywhere: Callable[[bool], bool]
    waits: WaitReporter
    notify: Notify

    def converse(
        self, rollouts: Rollouts, asked: TurnRequest, decoding: Decoding, step: int, *, needed: bool
    ) -> TurnAnswers:
        """Answer. Every rank must call it, with prompts or without.

        decoding: max_new_tokens are those of all turns, and of what the environment says, together.
        step: that the answers are for.
        needed: whether to raise InputError or EnvironmentFault, on every rank, if the environment failed for all
            answers of all ranks.
        """
        chats = [
            _Chat(place, record, name, seed, tuple(prompt), decoding.max_new_tokens)
            for prompt, record, name, seed, place in zip(
                asked.prompts, asked.records, asked.names, asked.seeds, asked.places, strict=True
            )
        ]
        try:
            self._talk(rollouts, chats, decoding, step)
        finally:
            self._close([chat.seat for chat in chats], step)
        everywhere = needed and not self.anywhere(any(chat.lost is None for chat in chats))
        self._tell_lost(chats, step, everywhere)
        scores = [one.score for one in chats]
        sums = sum(
            (chat.counts for chat in chats),
            Counter(f"environment_{one.outcome}" for one in scores),
        )
        return TurnAnswers(
            [one.rollout for one in chats],
            scores,
            [[reply.text for reply in one.heard[1 : (len(one.pieces) + 1) // 2]] for one in chats],
            {name: sums[name] for name in _SUMS},
        )

    def _talk(self, rollouts: Rollouts, chats: list[_Chat], decoding: Decoding, step: int) -> None:
        self._ask(chats, step, decoding.seed)
        for chat in chats:
            if chat.heard and (text := chat.heard[0].text):
                size = len(chat.prompt)
                chat.prompt = self.marks.before_answer(chat.prompt, text)
                chat.room -= len(chat.prompt) - size
            if chat.room < 1:
                chat.end(limit=_OVER_TOKENS)
        turn = 0
        while self.anywhere(any(chat.goes_on for chat in chats)):
            self._turn(rollouts, [chat for chat in chats if chat.goes_on], decoding, turn, step)
            turn += 1

    def _turn(self, rollouts: Rollouts, chats: list[_Chat], decoding: Decoding, turn: int, step: int) -> None:
        own = replace(decoding, seed=_turn_seed(decoding.seed, turn))
        with self.waits.during("answering", f"the engine writes turn {turn + 1} of {len(chats)} answers"):
            drawn = rollouts.answer(
                [(*chat.prompt, *chat.response) for chat in chats],
                own,
                [chat.place for chat in chats],
                [chat.room - len(chat.response) for chat in chats],
            )
        for chat, answer in zip(chats, drawn, strict=True):
            chat.draw(answer)
            if not answer.stopped:
                chat.end(limit=_OVER_TOKENS)
        asking = [chat for chat in chats if chat.goes_on]
        self._ask(
            asking,
            step,
            decoding.seed,
            [self._text(chat.response[-chat.pieces[-1] : -1]) for chat in asking],
        )
        for chat in asking:
            if chat.lost is not None:
                continue
            if chat.heard[-1].done:
                chat.end()
            elif turn + 1 == self.turns:
                chat.end(limit=_OVER_TURNS)
            else:
                ids = self.marks.after_answer(chat.heard[-1].turns)
                if len(chat.response) + len(ids) < chat.room:
                    chat.give(ids)
                else:
                    chat.end(limit=_OVER_TOKENS)

    def _ask(self, chats: Sequence[_Chat], step: int, seed: int, turns: Sequence[str] | None = None) -> None:
        """Get an answer for each. turns: texts of the newest ones; None: before the first."""
        texts: Sequence[str | None] = [None] * len(chats) if turns is None else turns
        keys = [key_of(step, seed, chat.place, (*chat.prompt, *chat.response)) for chat in chats]
        known = {place: kept for place, key in enumerate(keys) if (kept := self.recorded.find(key)) is not None}
        for place, kept in known.items():
            chats[place].counts[_REPEATED] += kept.tries - 1
        replies = {place: kept.said for place, kept in known.items()}
        left = [place for place in range(len(chats)) if place not in known]
        for attempt in range(_TRIES):
            if not left:
                break
            for place in left if attempt else ():
                chats[place].counts[_REPEATED] += 1
            calls = [(place, chats[place], texts[place]) for place in left]
            replies |= self._live(
                calls, lambda place, kept: self.recorded.keep(step, keys[place], kept), attempt + 1, step
            )
            left = [place for place in left if isinstance(replies[place], Lost)]
        for place, (chat, text) in enumerate(zip(chats, texts, strict=True)):
            reply = replies[place]
            if isinstance(reply, Reply):
                chat.heard.append(reply)
                chat.said += [] if text is None else [text]
            else:
                chat.lost, chat.goes_on = reply, False

    def _live(
        self,
        asking: Sequence[tuple[int, _Chat, str | None]],
        keep: Callable[[int, Kept], None],
        tries: int,
        step: int,
    ) -> dict[int, Reply | Lost]:
        """Make a call for each (place, chat, text); the episodes of those that fail are closed.

        keep: records a reply, or the failure of the last try.
        """
        pending: list[int] = []
        replies: dict[int, Reply | Lost] = {}

        def late(numbers: Sequence[int]) -> None:
            pending[:] = numbers

        def standing() -> str:
            names = first_few([str(asking[number][1].name) for number in pending], 4)
            return f"the environment {self.environment.name} is asked for {len(pending)} answers (records {names})"

        def heard(place: int, said: Reply | BaseException) -> None:
            if isinstance(said, InputError):  # it ends the run
                return
            found = Lost.by(said, self.environment.name) if isinstance(said, BaseException) else said
            replies[place] = found
            if isinstance(found, Reply) or tries == _TRIES:
                keep(place, Kept(found, tries))

        calls = [
            Call(
                lambda chat=chat, seat=chat.seat, text=text: self._call(chat, seat, text),
                self.seconds * (1 + (len(chat.heard) if chat.seat.episode is None else 0)),
                lambda said, place=place: heard(place, said),
                chat.seat.close,
            )
            for place, chat, text in asking
        ]
        with self.waits.during(ENVIRONMENT, standing):
            found = in_time(calls, late)
        failed: list[_Seat] = []
        for (_, chat, _), said in zip(asking, found, strict=True):
            if isinstance(said, BaseException):
                # One that is late is still in use, and is closed by its thread.
                failed += [] if isinstance(said, Late) else [chat.seat]
                chat.seat = _Seat()
        self._close(failed, step)
        for said in found:
            if isinstance(said, InputError):  # it cannot be read, and will not be
                raise said
        return replies

    def _call(self, chat: _Chat, seat: _Seat, text: str | None) -> Reply:
        """Say the newest turn; in a new episode all before it as well."""
        if seat.episode is None:
            seat.episode = self.environment.make()
            for before, known in zip([None, *chat.said], chat.heard, strict=False):  # nothing was heard before a reset
                if self._say(seat.episode, chat, before) != known:
                    raise _Changed(f"turn {len(chat.heard)} needs an episode as before, which now answers otherwise")
        return self._say(seat.episode, chat, text)

    def _say(self, episode: Episode, chat: _Chat, text: str | None) -> Reply:
        return episode.reset(chat.record, chat.seed) if text is None else episode.step(text)

    def _close(self, seats: Sequence[_Seat], step: int) -> None:
        """Close the episodes, all at once; one line for those that cannot be."""
        calls = [Call(one.close, self.seconds, lambda said: None) for one in seats if one.episode is not None]
        errors = [one for one in in_time(calls, lambda numbers: None) if isinstance(one, BaseException)]
        if errors:
            first = Lost.by(errors[0], self.environment.name)
            what = f"close failed for {len(errors)} of {len(calls)} objects of the environment"
            self.notify(f"step {step}: {what}: {first.where}: {first.what}")

    def _tell_lost(self, chats: Sequence[_Chat], step: int, everywhere: bool) -> None:
        """One line for the answers that the environment lost. everywhere: raise, since all of all ranks are lost."""
        lost = [(chat.lost, chat.name) for chat in chats if chat.lost is not None]
        if everywhere:
            self.recorded.ask_again(step)
        if everywhere and not lost:
            what = "the environment failed for each answer of the other ranks"
            raise EnvironmentFault(Fault(self.environment.name, what, "see their lines", code="SF-ENVIRONMENT"))
        if not lost:
            return
        first, record = lost[0]
        if everywhere:
            fault = Fault(first.where, f"{first.what}, for each of {len(lost)} answers", code="SF-ENVIRONMENT")
            raise (InputError if first.own_code else EnvironmentFault)(fault) from first.error
        self.notify(
            f"step {step}: {len(lost)} of {len(chats)} answers are lost, the first to record {record}: "
            f"{first.where}: {first.what}"
        )

    def _text(self, ids: Sequence[int]) -> str:
        """With its control tokens, which calls of tools may be written in."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def counted(sums: Mapping[str, float], answers: int) -> dict[str, float]:
    """What is logged. sums: over so many answers, as in `TurnAnswers`; {} without an environment."""
    if not sums:
        return {}
    shares = {name: sums[name] / answers for name in (_TURNS, _OVER_TURNS, _OVER_TOKENS)}
    return shares | {name: sums[name] for name in (_REPEATED, *_LOST) if sums[name]}


def episode_seed(seed: int, prompt: int) -> int:
    """Seed of an environment's episodes. prompt: its place in the data."""
    return int(np.random.SeedSequence([seed, prompt]).generate_state(1)[0])


def _turn_seed(seed: int, turn: int) -> int:
    """Seed of a turn's draws; that of the first is the answer's own."""
    return seed if turn == 0 else int(np.random.SeedSequence([seed, turn]).generate_state(2, np.uint64)[0])
