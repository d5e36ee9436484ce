"""A teacher on a server: token ids go there, and the K likeliest tokens of each learned position come back.

The server is vLLM, asked by /v1/completions with prompt_logprobs, which are at temperature 1. The probability of all
other tokens together is 1 less those that were returned, so it is a lower-bounded outcome of its own (`_LEAST_REST`):
where the teacher is nearly sure, their sum is 1 up to the rounding of fp32.

Before step 1 the tokenizer is compared by the ids of texts of the data, and the highest id of the student's tokenizer
is sent. Each example is asked about once; `TeacherRecord` stores the answers, and a resumed run reads them there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import (
    Batch,
    DrawnBatch,
    Example,
    Weighted,
    example_digest,
    in_rows,
    row_digests,
)
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.kernels.divergence import Known, Likeliest
from surefoot.methods.distill.teacher_record import TeacherRecord
from surefoot.methods.losses.distill import stand_in
from surefoot.methods.method import LoadedModels, Notify, RunInputs
from surefoot.models.served import ServedModel, served_model
from surefoot.system.errors import EnvironmentFault, Fault, InputError, IntegrityError
from surefoot.system.posting import Server, server

KEY = "distill.teacher"
_AT_ONCE = 8  # requests; one to a server with adapters: vLLM 0.32 on a CPU crashes on two, about its base too
# 2^-20: a log-probability near 0 is off by the last bit of its logits, 2^-20 at 8 to 16, and so is 1 less its
# probability. What is smaller than that cannot be told from 0.
_LEAST_REST = 2.0**-20
_MORE_THAN_ONE = 1e-2  # by which the sum of probabilities may exceed 1: 16-bit logits, and rounding of the server's own
# Mean difference in nats, of an example that is asked about again on resume: the rounding of bf16 in other batches.
_SAME = 0.1
_TEXTS = 8  # of the data, by which tokenizers are compared


def open_model(config: RunConfig) -> ServedModel:
    """Raises EnvironmentFault if the server does not answer, InputError for a model that it does not have."""
    assert config.distill.teacher is not None
    return served_model(server(config.distill.teacher, KEY), config.distill.teacher_name, "distill.teacher_name")


class ServedTeacher:
    """The `Teacher` of a run or of `surefoot teach`.

    top: K.
    words: number of token ids, from 0, that both models have.
    record: of the run; None keeps nothing.
    """

    def __init__(self, model: ServedModel, top: int, words: int, record: TeacherRecord | None = None):
        self._model, self._top, self._words, self._record = model, top, words, record

    @property
    def server(self) -> Server:
        return self._model.server

    def prepare(self, step: int, batches: Sequence[Weighted]) -> Sequence[Weighted]:
        """Ask about the examples of a step before it, many at once, whatever their batches. Returns the batches."""
        self._ask_missing([(batch.rows, step if isinstance(batch, DrawnBatch) else None) for batch in batches])
        return batches

    def __call__(self, rows: Batch, places: torch.Tensor) -> Known:
        if not rows.lengths:  # a blank batch, of no weight
            return stand_in(rows, places)
        device, record = rows.input_ids.device, self._record
        new = self._ask_missing([(rows, None)])
        found = [record.find(one) if record is not None else new[one] for one in row_digests(rows)]
        tokens, logprobs, rest = (
            torch.cat([getattr(one, name) for one in found]).to(device) for name in ("tokens", "logprobs", "rest")
        )
        return Likeliest(tokens.long(), logprobs, rest, self._words)

    def _ask_missing(self, batches: Sequence[tuple[Batch, int | None]]) -> dict[bytes, Likeliest]:
        """Ask about the examples of (rows, step) that the record does not have, and keep the answers. Returns these by
        digest. step: of answers that the student has drawn."""
        record = self._record
        missing: dict[bytes, tuple[list[int], list[int], int | None]] = {}
        for rows, step in batches:
            own = row_digests(rows)
            if record is not None and all(one in record for one in own):  # nothing has to come from the device
                continue
            ids, targets = (in_rows(one, rows).cpu().tolist() for one in (rows.input_ids, rows.targets))
            for digest, length, asked, learned in zip(own, rows.lengths, ids, targets, strict=True):
                if record is None or digest not in record:
                    missing.setdefault(digest, (asked[:length], learned[:length], step))
        if not missing:
            return {}
        many = 1 if self._model.adapters else min(_AT_ONCE, len(missing))
        with self._model.server.at_once(many) as pool:
            found = dict(zip(missing, pool.map(lambda one: self._one(*one[:2]), missing.values()), strict=True))
        if record is not None:
            for digest, one in found.items():
                record.keep(digest, missing[digest][2], one)
        return found

    def _one(self, ids: Sequence[int], targets: Sequence[int]) -> Likeliest:
        """Ask about one example. targets: the next token where it is learned, else negative."""
        learned = [place for place, target in enumerate(targets) if target >= 0]
        if not learned:
            nothing = torch.zeros(0, self._top)
            return Likeliest(nothing.int(), nothing, torch.zeros(0))
        places = self._model.likeliest(ids, self._top)
        if len(places) != len(ids) - 1:
            raise self._wrong(f"{len(places)} positions for a prompt of {len(ids)} tokens")
        rows = [self._kept(places[place], targets[place]) for place in learned]
        logprobs = np.array([[value for _, value in row] for row in rows], dtype=np.float32)
        rest = 1 - np.exp(logprobs.astype(np.float64)).sum(axis=1)
        if rest.min() < -_MORE_THAN_ONE:
            raise self._wrong(f"probabilities of one position that add up to {1 - rest.min():.4f}")
        return Likeliest(
            torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int32),
            torch.from_numpy(logprobs),
            torch.from_numpy(np.log(np.maximum(rest, _LEAST_REST)).astype(np.float32)),
        )

    def _kept(self, found: Mapping[int, float], target: int) -> list[tuple[int, float]]:
        """The likeliest tokens of a position, from those returned; the token that stands there is always among them."""
        if target not in found:
            raise self._wrong("log-probabilities of another position: the token of the prompt is not among them")
        best = sorted(found.items(), key=lambda one: (-one[1], one[0]))[: self._top]
        if len(best) < self._top:
            raise self._wrong(f"{len(best)} tokens of a position, and distill.top is {self._top}")
        if not all(0 <= token < self._words and math.isfinite(value) for token, value in best):
            raise self._wrong(f"a number that is not finite, or a token id beyond the tokenizer's {self._words:,}")
        return best

    def _wrong(self, what: str) -> EnvironmentFault:
        return EnvironmentFault(Fault(self._model.server.address, f"returned {what}", "see its log", code="SF-SERVER"))

    def check_same(self, examples: Mapping[bytes, Example]) -> None:
        """Raise IntegrityError if the server says something else about a recorded example than it did.

        examples: of the data, by digest.
        """
        record = self._record
        digest = next((one for one in examples if record is not None and one in record), None)
        if record is None or digest is None:
            return
        then, example = record.find(digest), examples[digest]
        targets = np.append(np.where(example.supervised[1:], example.ids[1:], -1), -1)
        now = self._one(example.ids.tolist(), targets.tolist())
        if not len(now.rest):
            return
        there = now.tokens == then.tokens[:, :1]
        again = now.logprobs.where(there, now.logprobs[:, -1:]).amax(dim=1)
        apart = float((again - then.logprobs[:, 0]).abs().mean())
        if apart > _SAME:
            what = f"is another model than this run began with: its log-probabilities are {apart:.3g} nats apart"
            fix = "serve the old one, or start another run"
            raise IntegrityError(Fault(self._model.server.address, what, fix, code="SF-RESUME-CHANGED"))


def open_served(run: RunInputs, loaded: LoadedModels, words: int, notify: Notify) -> ServedTeacher:
    """Open the teacher of a run.

    words: token ids of the student.

    Raises InputError for a server whose model has another tokenizer or too short a context, IntegrityError for another
    model than a resumed run's.
    """
    config, model = run.config, open_model(run.config)
    longest = run.plan.tokenizer.max_length.value
    words = check_server(model, config.distill.top, run.tokenizer, words, run.task.data.train, longest)
    now = {"model": model.name, "version": model.version}
    record = TeacherRecord(Path(config.output), loaded.engine.rank, loaded.state.step, now)
    teacher = ServedTeacher(model, config.distill.top, words, record)
    before = record.before
    if before is not None:
        if before != now:
            was = ", ".join(f"{name} {before.get(name)}" for name in now)
            notify(f"the teacher's server was {was}: what it is asked from here on may differ in the last bits")
        # Of the last step, which the server has been asked about, unless the student has drawn all of its answers.
        asked = run.task.step_places(loaded.state.step) if loaded.state.step else ()
        teacher.check_same({example_digest(one): one for one in (run.task.data.train[int(place)] for place in asked)})
    return teacher


def check_server(
    model: ServedModel, top: int, tokenizer: PreTrainedTokenizerBase, words: int, data: TokenizedDataset, longest: int
) -> int:
    """Return the number of token ids that both models have: the tokenizer's, without a PAD of the student's own. Raises
    InputError where the server's model cannot be the teacher of these data.

    top: K.
    tokenizer: the student's. words: its token ids.
    longest: tokens of an example.
    """
    if model.longest is not None and longest >= model.longest:
        what = f"takes {model.longest:,} tokens with one of an answer, and examples have up to {longest:,}"
        fix = "start it with a larger --max-model-len, or lower data.max_length"
        raise InputError(Fault(KEY, what, fix, code="SF-DATA-LENGTH"))
    texts = [str(tokenizer.decode(data[place].ids.tolist())) for place in range(min(_TEXTS, len(data)))]
    for text in texts:
        if model.text_ids(text) != tokenizer(text, add_special_tokens=False)["input_ids"]:
            what = "has another tokenizer than the student: it gives a text of the data other ids"
            fix = "serve a model of the same family and vocabulary"
            raise InputError(Fault(KEY, what, fix, code="SF-TOKENIZER"))
    own = {number for token, number in tokenizer.get_vocab().items() if token != tokenizer.pad_token and number < words}
    first = min(own)
    if top > max(own):
        what = f"{top:,} likeliest tokens are asked for, and the tokenizer has {max(own) + 1:,}"
        raise InputError(Fault(KEY, what, "ask for fewer", code="SF-CONFIG-VALUE"))
    model.likeliest([first, first], top)  # raises what else is wrong with the server
    try:
        model.likeliest([first, max(own)], 1)
    except EnvironmentFault as error:
        what = f"refuses the student's token id {max(own):,}, so it has fewer ids ({error.faults[0].what})"
        raise InputError(Fault(KEY, what, "serve a model of the same vocabulary", code="SF-TOKENIZER")) from None
    return max(own) + 1
