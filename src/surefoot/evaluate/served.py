"""`surefoot verify --served`: check that a server answers with the model that was trained.

A server that accepts an adapter may still not apply it: vLLM accepts one whose keys have another prefix than its
modules, reports that it was added, and answers like the base (vllm#34186). So held-out texts are sent to the server as
token ids, and its log-probability of each token is compared with the trained model's and with the base's.

The difference allowed between two correct programs is measured: the trained model runs once in fp32 and once in bf16
(or fp16, if its base is stored so). A server that computes in fp32 is within 1e-4 nats, one that computes in 16 bits
within a few times that rounding.

Shapes: N tokens of all texts, without each text's first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from surefoot.data.formats import Turn
from surefoot.evaluate.loss import held_out_data, read_evaluation_data, without_pictures
from surefoot.evaluate.side_by_side import adapter_off
from surefoot.evaluate.texts import TEXT, last_tokens
from surefoot.methods.open_model import OpenModel, conversation_ids, open_for_use, raw_ids
from surefoot.methods.provenance import saved_config
from surefoot.methods.requests import DataRequest
from surefoot.models.forward import causal_model
from surefoot.models.peft import PeftModel
from surefoot.models.precision import is_quantized
from surefoot.models.served import ServedModel
from surefoot.report.tables.served import Dialogue, Distance, FirstDifference, ServedReport, Verdict
from surefoot.system import hardware
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.messages import counted, size_text

# In nats. Another program's fp32 differed by at most 3e-6 (vLLM 0.32 on a CPU, 2026-11).
FP32 = 1e-4
# Factor on the effect of rounding the trained model to 16 bits: a server rounds in other places, and the model too.
LARGEST, MEAN = 4.0, 2.0
TEXTS, LONGEST = 16, 512  # texts, and tokens of each
_DIALOGUES = (
    (Turn("user", "Name three rivers."),),
    (Turn("user", "Name three rivers."), Turn("assistant", "Rhine, Nile, Amazon."), Turn("user", "And a lake?")),
)


def measure_served(
    path: str,
    served: ServedModel,
    *,
    data: DataRequest | None = None,
    texts: int = TEXTS,
    threshold: float | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> ServedReport:
    """Compare a served model with the model at `path`.

    path: a run, checkpoint, adapter, export or model.
    data: texts to use instead of the run's held-out ones.
    texts: number of texts.
    threshold: nats by which any token may differ; None: see the head of this module.
    on_progress: called with progress messages.

    Raises InputError if rounding cannot be measured here, EnvironmentFault if the server does not answer.
    """
    on_progress("opening the model")
    opened = open_for_use(path)
    ids, source = _texts(opened, data, texts, served.longest)
    on_progress(f"asking {served.name} for {counted(len(ids), 'text')}")
    answers = np.concatenate([np.asarray(one) for one in served.prompt_logprobs(ids)])
    on_progress("asking the trained model")
    own = _own_logprobs(opened, ids, threshold)
    limits = _limits(own, threshold)
    within = next((limit for limit in limits if limit.holds(_distance(answers, own.trained))), None)
    from_base = effect = strength = None
    if own.base is not None:
        from_base, effect = _distance(answers, own.base), _distance(own.trained, own.base)
        strength = _strength(answers, own.trained, own.base)
    verdict: Verdict = "neither"
    if within:
        verdict = "undecided" if effect and within.holds(effect) else "trained"
    elif from_base and any(limit.holds(from_base) for limit in limits):
        verdict = "base"
    return ServedReport(
        verdict=verdict,
        source=source,
        texts=len(ids),
        tokens=len(answers),
        within=within.name if within else "",
        limit=limits[-1].largest,
        from_trained=_distance(answers, own.trained),
        from_base=from_base,
        effect=effect,
        rounding=None if own.rounded is None else _distance(own.trained, own.rounded),
        strength=strength,
        first=_first_difference(opened, ids, answers, own.trained, limits[-1].largest),
        dialogues=_dialogues(opened, served),
        stops=_stops(opened, served, ids),
    )


def _texts(opened: OpenModel, request: DataRequest | None, most: int, room: int | None) -> tuple[list[list[int]], str]:
    """Token ids and their origin: DATA, the run's held-out data, or else a built-in text.

    most: number of texts.
    room: the server's maximum of prompt tokens plus one.
    """
    data = read_evaluation_data(opened, request, any_layout=True)[0] if request else held_out_data(opened)
    longest = min(LONGEST, opened.positions, (room or LONGEST + 1) - 1)
    if data is None:
        return [last_tokens(raw_ids(opened, TEXT), longest, opened.bos_id)], "a built-in text"
    without_pictures(data)
    ids = (data.train[place].ids.tolist()[:longest] for place in range(len(data.train)))
    found = list(itertools.islice((one for one in ids if len(one) > 1), most))
    return found, request.source if request else "the run's held-out texts"


@torch.no_grad()
def text_logprobs(model: nn.Module, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Log-probability of every token but the first of each text: [N] float64. One text at a time, because padding could
    add a difference."""
    device = next(model.parameters()).device
    found = []
    for ids in texts:
        tokens = torch.tensor([ids], device=device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].cpu())
    return torch.cat(found).double().numpy()


@dataclass(frozen=True)
class _Own:
    """Log-probabilities computed by surefoot, [N] each.

    trained: in fp32; with a threshold in the model's own type.
    base: None if there is none, or it is not found.
    rounded: of the trained model in 16 bits; None with a threshold.
    narrow: the 16-bit type.
    """

    trained: np.ndarray
    base: np.ndarray | None
    rounded: np.ndarray | None = None
    narrow: str = ""


def _own_logprobs(opened: OpenModel, ids: list[list[int]], threshold: float | None) -> _Own:
    """Compute them. Converts the model's weights to another type, after computing the fp32 values."""
    model = opened.model
    held = causal_model(model).get_input_embeddings().get_parameter("weight").dtype
    if threshold is not None:
        with opened.context():
            return _Own(text_logprobs(model, ids), _of_base(opened, ids))
    if held == torch.float32:
        trained, base = text_logprobs(model, ids), _of_base(opened, ids)
        return _Own(trained, base, text_logprobs(model.to(torch.bfloat16), ids), "bf16")
    # Convert in place: a second copy would need more memory than was checked for.
    wanted = 4 * sum(one.numel() for one in model.parameters())
    packed = any(map(is_quantized, model.modules()))
    free = hardware.detect().free
    if packed or (free is not None and wanted > free):
        why = (
            "is quantized" if packed else f"needs {size_text(wanted)} in fp32, but only {size_text(free or 0)} are free"
        )
        fix = "give --threshold in nats per token, such as 0.3 for a server that computes in 16 bits"
        raise InputError(Fault(str(opened.trained), f"{why}: rounding cannot be measured", fix, code="SF-MEMORY"))
    with opened.context():
        rounded = text_logprobs(model, ids)
    model.to(torch.float32)
    return _Own(text_logprobs(model, ids), _of_base(opened, ids), rounded, "bf16" if held == torch.bfloat16 else "fp16")


def _of_base(opened: OpenModel, ids: list[list[int]]) -> np.ndarray | None:
    """Log-probabilities of the base below the adapter, or of the model that a full fine-tuning started from."""
    if isinstance(opened.model, PeftModel):
        with adapter_off(opened), opened.context() if opened.plan is None else nullcontext():
            return text_logprobs(opened.model, ids)
    run = saved_config(opened.trained)
    if run is None:
        return None
    try:
        return text_logprobs(open_for_use(str(run.model.path), held="fp32").model, ids)
    except SurefootError:
        return None  # it was moved or deleted


@dataclass(frozen=True)
class _Limit:
    """An allowed difference. name: what it allows for. largest, mean: nats."""

    name: str
    largest: float
    mean: float

    def holds(self, distance: Distance) -> bool:
        return distance.largest <= self.largest and distance.mean <= self.mean


def _limits(own: _Own, threshold: float | None) -> list[_Limit]:
    """The limits to try, narrowest first."""
    if threshold is not None:
        return [_Limit("the threshold", threshold, threshold)]
    assert own.rounded is not None
    noise = _distance(own.trained, own.rounded)
    rounding = _Limit(f"rounding to {own.narrow}", max(FP32, LARGEST * noise.largest), max(FP32, MEAN * noise.mean))
    return [_Limit("fp32", FP32, FP32), rounding]


def _distance(first: np.ndarray, second: np.ndarray) -> Distance:
    apart = np.abs(first - second)
    return Distance(float(apart.max()), float(apart.mean()))


def _strength(answers: np.ndarray, trained: np.ndarray, base: np.ndarray) -> float | None:
    """Least squares of served = base + strength (trained - base); None if training changed nothing."""
    changed = trained - base
    size = float(changed @ changed)
    return float((answers - base) @ changed) / size if size else None


def _first_difference(
    opened: OpenModel, ids: list[list[int]], answers: np.ndarray, trained: np.ndarray, limit: float
) -> FirstDifference | None:
    beyond = np.flatnonzero(np.abs(answers - trained) > limit)
    if not len(beyond):
        return None
    places = [(text, place) for text, one in enumerate(ids) for place in range(1, len(one))]
    text, place = places[int(beyond[0])]
    shown = opened.tokenizer.decode([ids[text][place]])
    number = int(beyond[0])
    return FirstDifference(text + 1, place, str(shown), float(answers[number]), float(trained[number]))


def _dialogues(opened: OpenModel, served: ServedModel) -> tuple[Dialogue, ...]:
    """Empty for a model that learned texts, and if the template cannot format these dialogues."""
    run = saved_config(opened.trained)
    if run is not None and run.method.plain_texts:
        return ()
    found = []
    for turns in _DIALOGUES:
        try:
            own = conversation_ids(opened, turns)
        except InputError:
            continue
        theirs = served.dialogue_ids([{"role": turn.role, "content": turn.content} for turn in turns])
        found.append(_compared(opened, len(turns), theirs, own))
    return tuple(found)


def _compared(opened: OpenModel, turns: int, theirs: list[int] | int | None, own: list[int]) -> Dialogue:
    if theirs is None or theirs == own:
        return Dialogue(turns, None if theirs is None else True)
    if isinstance(theirs, int):
        return Dialogue(turns, theirs == len(own), None, counted(theirs, "token"), counted(len(own), "token"))
    pairs = itertools.zip_longest(theirs, own)
    place = next(number for number, (one, other) in enumerate(pairs) if one != other)
    shown = [str(opened.tokenizer.decode(one[place : place + 8])) for one in (theirs, own)]
    return Dialogue(turns, False, place, *shown)


def _stops(opened: OpenModel, served: ServedModel, ids: list[list[int]]) -> dict[str, bool]:
    """Test the stop tokens with which the texts end answers, else the first."""
    tokens = opened.tokens.stop.value
    learned = [token for token in tokens if any(token in one for one in ids)] or tokens[:1]
    return {
        str(opened.tokenizer.convert_ids_to_tokens(token)): served.ends_with(ids[0][:8], token) for token in learned
    }
