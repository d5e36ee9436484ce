"""Answers of the policy to learn from, with how likely each token was when it was drawn.

An engine is anything with `answer`. `EmbeddedRollouts` runs the policy itself; `VllmRollouts` asks a vLLM
server (`vllm serve`) over HTTP, because vLLM pins a torch of its own and so stays out of this process.

The log-probability that counts is the one at the temperature, among all tokens: at a temperature T the policy that
draws is softmax(logits / T), and that is the policy which PPO improves, so old and new log-probabilities must both be
taken there. top_p < 1 draws from a part of that distribution alone, which the ratio of PPO does not know: the reported
log-probabilities are those before the cut, and importance weights are then an approximation.

An answer is a function of the weights, its prompt, the seed and its place, not of what else is in its batch: tokens
are equal, log-probabilities within rounding, however the prompts are split.

The server:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora --max-lora-rank 64 --max-loras 2

One request to /v1/completions for each prompt, with its token ids and a seed of its own: one request with all prompts
would give equal prompts equal answers, because vLLM seeds each of them alike. vLLM batches the requests itself.

The policy goes there as a PEFT folder that the server can read, under a new name each time, because vLLM keeps what it
has loaded under a name; the one before is dropped. Limits: LoRA adapters alone (vLLM has no DoRA, and takes a whole
model only when it starts); its kernels round otherwise than training does, so its log-probabilities are for the report,
not for the ratio; they are those before temperature and top_p (its default, raw_logprobs), so they are handed on at
temperature 1 alone. Draws repeat only on the same version, machine and load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from surefoot.families.files import read_json
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.generate import Decoding, draw_steps
from surefoot.models.modes import eval_mode
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.posting import Server


@dataclass(frozen=True)
class Rollout:
    """One answer of the policy.

    prompt, response: token ids; the response ends with its stop token, where it has one.
    stopped: by that, not by the limit.
    logprobs: of each response token at the temperature, among all tokens or among `kept`, as was asked for; None where
        the engine cannot tell. A model that has lost its way gives numbers that are not finite: they are handed on.
    kept: of each response token those that could be drawn in its place; None where it was not asked for, or all could.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    stopped: bool
    logprobs: tuple[float, ...] | None
    kept: tuple[tuple[int, ...], ...] | None = None


class Rollouts(Protocol):
    def answer(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, places: Sequence[int] | None = None
    ) -> list[Rollout]:
        """One for each prompt (token ids, at least one), in their order.

        places: number each prompt among those of all ranks, so that its draws are its own; None: their order here.
        """
        ...


class EmbeddedRollouts:
    """The policy in this process, with a key-value cache.

    rows: prompts in a batch; prompts of like length go together.
    context: autocast as in training, or nothing.
    keep_going: see `generate.draw_steps`; it is called before every batch as well, so that ranks with fewer prompts go
        along until the last has answered its own.
    """

    def __init__(
        self,
        policy: nn.Module,
        rows: int,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        keep_going: Callable[[bool], bool] = bool,
    ):
        self._policy, self._rows, self._context, self._keep_going = policy, rows, context, keep_going

    def answer(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, places: Sequence[int] | None = None
    ) -> list[Rollout]:
        numbers = range(len(prompts)) if places is None else places
        waiting = sorted(range(len(prompts)), key=lambda one: len(prompts[one]))
        answers: dict[int, Rollout] = {}
        with eval_mode(self._policy):
            while self._keep_going(bool(waiting)):
                batch = [waiting.pop() for _ in range(min(self._rows, len(waiting)))]  # the longest first
                found = self._batch([prompts[one] for one in batch], [numbers[one] for one in batch], decoding)
                answers.update(zip(batch, found, strict=True))
        return [answers[one] for one in range(len(prompts))]

    @torch.no_grad()
    def _batch(self, prompts: Sequence[Sequence[int]], places: Sequence[int], decoding: Decoding) -> list[Rollout]:
        """No prompts: the steps of the other ranks."""
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        kept: list[list[tuple[int, ...]]] | None = (
            [[] for _ in prompts] if decoding.among_kept and decoding.cuts else None
        )
        with self._context():
            for drawn in draw_steps(self._policy, prompts, decoding, places=places, keep_going=self._keep_going):
                for row, token, likely in zip(drawn.rows, drawn.tokens, drawn.logprobs, strict=True):
                    tokens[row].append(token)
                    logprobs[row].append(likely)
                if kept is not None and drawn.kept is not None:
                    for row, own in zip(drawn.rows, drawn.kept, strict=True):
                        kept[row].append(tuple(own))
        return [
            Rollout(
                tuple(prompt),
                tuple(ids),
                bool(ids) and ids[-1] in decoding.stop_ids,
                tuple(likely),
                None if kept is None else tuple(kept[row]),
            )
            for row, (prompt, ids, likely) in enumerate(zip(prompts, tokens, logprobs, strict=True))
        ]


_AT_ONCE = 64  # requests under way
_PATH = "/v1/completions"
_ROUNDING = 1e-3  # by which a logarithm of 1 may come out positive in bf16


class VllmRollouts:
    """model: the name that the server gives the base; None asks it."""

    def __init__(self, server: Server, model: str | None = None):
        self._server = server
        self._model = model or _served(server)
        self._adapter: str | None = None

    def synchronise(self, folder: Path, name: str) -> None:
        """Answer with the adapter in `folder` (as `save_adapter` writes it) from now on.

        name: not used before.
        Raises InputError for a folder that is no LoRA adapter, EnvironmentFault where the server does not take it.
        """
        _check_adapter(folder)
        self._server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        before, self._adapter = self._adapter, name
        if before is not None:
            self._server.post("/v1/unload_lora_adapter", {"lora_name": before})

    def answer(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, places: Sequence[int] | None = None
    ) -> list[Rollout]:
        """See `Rollouts`. Raises EnvironmentFault for any other reply than one answer for each prompt."""
        settings = {
            "model": self._adapter or self._model,
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "stop_token_ids": sorted(decoding.stop_ids),
            "logprobs": 0,  # of the drawn token alone
            "return_token_ids": True,
            # What a model's generation_config.json would set otherwise.
            "ignore_eos": True,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }

        def one(number: int, prompt: Sequence[int]) -> Rollout:
            body = settings | {"prompt": list(prompt), "seed": _seed(decoding.seed, number)}
            reply = self._server.post(_PATH, body)
            return _rollout(self._server.address + _PATH, prompt, reply, settings, frozenset(decoding.stop_ids))

        numbers = range(len(prompts)) if places is None else places
        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(prompts)))) as pool:
            return list(pool.map(one, numbers, prompts))


def _served(server: Server) -> str:
    reply = server.get("/v1/models")
    try:
        return str(reply["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        where, fix = f"{server.address}/v1/models", "is it a vLLM server?"
        raise EnvironmentFault(Fault(where, "names no model", fix, code="SF-SERVER")) from None


def _check_adapter(folder: Path) -> None:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        what = "is not an adapter, and vLLM takes a whole model only when it starts"
        fix = "train with adapter.kind: lora, or use engine: embedded"
        raise InputError(Fault(str(folder), what, fix, code="SF-ADAPTER-FIT"))
    if read_json(path).get("use_dora"):
        what = "is DoRA, which vLLM cannot serve"
        raise InputError(Fault(str(path), what, "use engine: embedded", code="SF-ADAPTER-DORA"))


def _seed(seed: int, place: int) -> int:
    """A stream of its own for each place: 32 bits, the same on every machine."""
    return int(np.random.SeedSequence((seed, place)).generate_state(1)[0])


def _rollout(
    where: str, prompt: Sequence[int], reply: Any, requested: dict[str, Any], stop_ids: frozenset[int]
) -> Rollout:
    try:
        (choice,) = reply["choices"]
        ids = tuple(int(token) for token in choice["token_ids"])
        logprobs = tuple(float(value) for value in choice["logprobs"]["token_logprobs"])
    except (TypeError, KeyError, ValueError):
        what = "answers without choices, token_ids and logprobs as vLLM 0.10.2 and later have them"
        raise EnvironmentFault(Fault(where, what, "is it a vLLM server, and new enough?", code="SF-SERVER")) from None
    stopped = bool(ids) and ids[-1] in stop_ids
    if wrong := _wrong(ids, logprobs, stopped, requested["max_tokens"], stop_ids):
        raise EnvironmentFault(Fault(where, f"answers with {wrong}", "see the server's log", code="SF-SERVER"))
    return Rollout(tuple(prompt), ids, stopped, logprobs if requested["temperature"] == 1 else None)


def _wrong(
    ids: tuple[int, ...], logprobs: tuple[float, ...], stopped: bool, limit: int, stop_ids: frozenset[int]
) -> str | None:
    if not ids:
        return "no tokens"
    if len(ids) != len(logprobs):
        return f"{len(ids)} tokens and {len(logprobs)} log-probabilities"
    if len(ids) > limit:
        return f"{len(ids)} tokens, and {limit} at most were requested"
    if stop_ids.intersection(ids[:-1]):
        return "tokens after a stop token"
    if not stopped and len(ids) < limit:
        return "fewer tokens than requested, and no stop token"
    if not all(math.isfinite(value) and value <= _ROUNDING for value in logprobs):
        return "a log-probability that is NaN, infinite or positive"
    return None
