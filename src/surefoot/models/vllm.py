"""Generate answers with a vLLM server (0.32 or later) over HTTP and keep its weights up to date.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-scale-out --enable-lora --max-loras 2
    VLLM_SERVER_DEV_MODE=1 vllm serve BASE --enable-scale-out           # if all weights train

A LoRA adapter is sent as the path of a PEFT folder, with a new name each time, because vLLM caches adapters by name;
the previous one is unloaded. Full weights are sent as the path of a folder that vLLM loads while generation is paused;
its prefix cache is reset, and the weights get a version name. Every answer contains the adapter and the weight version
that generated it; answers by others are refused.

One request to /inference/v1/generate per prompt, with token ids in both directions. Each has its own seed; vLLM batches
them. Limits: no DoRA; vLLM's kernels round differently from training; samples repeat only on the same version, machine
and load.

vLLM returns log-probabilities before temperature, top_p and top_k, unless it runs with `--logprobs-mode
processed_logprobs`; one request finds out which (`VllmRollouts._processed`). The tokens that could be sampled are
returned as the top_k most likely ones, so top_k must not exceed its --max-logprobs (20).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.families.files import read_json
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.generate import Decoding
from surefoot.models.rollout import Arrived, Rollout, Shown, nothing
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.posting import Server

_AT_ONCE = 64  # concurrent requests
_PATH = "/inference/v1/generate"
_ROUNDING = 1e-3  # in bf16 a log-probability of 0 may be slightly positive, and probabilities may not sum to 1
_NEVER = -9000.0  # vLLM returns -9999 for log(0)
_RELOAD = 1800.0  # seconds for a server to load all weights


class VllmRollouts:
    """model: the server's name of the base; None: ask the server."""

    def __init__(self, server: Server, model: str | None = None):
        self._server = server
        self._base = model or _served(server)
        self._model = self._base
        self._version: str | None = None

    def synchronize(self, folder: Path, name: str) -> None:
        """Load `folder` on the server: an adapter (written by `save_adapter`) or all weights.

        name: not used before.
        Raises InputError for an adapter that vLLM cannot serve, EnvironmentFault if the server refuses it.
        """
        path = str(folder.resolve())
        if (folder / ADAPTER_CONFIG).is_file():
            _check_adapter(folder / ADAPTER_CONFIG)
            self._server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
            before, self._model = self._model, name
            if before != self._base:
                self._server.post("/v1/unload_lora_adapter", {"lora_name": before})
            return
        self._server.post("/pause?mode=wait", {})
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            replace(self._server, timeout=_RELOAD, tries=1).post("/collective_rpc", reload)
            if self._server.post("/reset_prefix_cache", {}) != {"success": True}:
                what = "does not reset its prefix cache after the weights changed"
                raise EnvironmentFault(
                    Fault(
                        f"{self._server.address}/reset_prefix_cache",
                        what,
                        "send it no other requests during training",
                        code="SF-SERVER",
                    )
                )
            self._server.post("/update_weight_version", {"new_version": name})
        finally:
            self._server.post("/resume", {})
        self._version = name

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        places: Sequence[int] | None = None,
        limits: Sequence[int] | None = None,
        arrived: Arrived = nothing,
        shown: Shown | None = None,
    ) -> list[Rollout]:
        """See `surefoot.models.rollout.Rollouts`. Raises EnvironmentFault for wrong answers."""
        assert shown is None, "the plan refuses pictures beside a server"
        cut = decoding.among_kept and decoding.cuts
        if cut and not self._processed:
            what = "vLLM returns log-probabilities before top_p and top_k, but ratios need those after them"
            fix = "start it with --logprobs-mode processed_logprobs, or leave both out"
            raise EnvironmentFault(Fault(self._server.address, what, fix, code="SF-SERVER"))
        sampling = {
            "temperature": decoding.temperature,
            "top_p": decoding.top_p,
            "top_k": decoding.top_k,
            "stop_token_ids": sorted(decoding.stop_ids),
            "logprobs": decoding.top_k if cut else 0,  # in addition to the sampled token's
            "ignore_eos": True,
            "repetition_penalty": 1.0,
            "detokenize": False,
        }

        def one(index: int, number: int, prompt: Sequence[int], limit: int) -> Rollout:
            own = sampling | {"max_tokens": limit, "seed": _seed(decoding.seed, number)}
            said = self._server.post(_PATH, {"model": self._model, "token_ids": list(prompt), "sampling_params": own})
            found = self._rollout(prompt, said, replace(decoding, max_new_tokens=limit))
            arrived(index, found)
            return found

        numbers = range(len(prompts)) if places is None else places
        most = [decoding.max_new_tokens] * len(prompts) if limits is None else limits
        with self._server.at_once(min(_AT_ONCE, max(1, len(prompts)))) as pool:
            found = list(pool.map(one, range(len(prompts)), numbers, prompts, most))
        return found if self._tells(decoding) else [replace(one, logprobs=None) for one in found]

    def _tells(self, decoding: Decoding) -> bool:
        """Whether its log-probabilities are of the requested kind."""
        if decoding.temperature == 1 and not decoding.cuts:
            return True
        if decoding.temperature == 0:
            return False
        if decoding.among_kept or not decoding.cuts:
            return self._processed
        return decoding.temperature == 1 and not self._processed

    @cached_property
    def _processed(self) -> bool:
        """Whether log-probabilities are after top_k: with top_k 1 that of the sampled token is then exactly 0."""
        sampling = {"max_tokens": 1, "temperature": 2.0, "top_k": 1, "seed": 0, "logprobs": 0, "detokenize": False}
        body = {"model": self._base, "token_ids": [0], "sampling_params": sampling}
        try:
            return self._server.post(_PATH, body)["choices"][0]["logprobs"]["content"][0]["logprob"] == 0
        except (TypeError, KeyError, IndexError):
            raise _no_vllm(self._server.address + _PATH) from None

    def _rollout(self, prompt: Sequence[int], said: Any, decoding: Decoding) -> Rollout:
        where = self._server.address + _PATH
        try:
            (choice,) = said["choices"]
            ids = tuple(int(token) for token in choice["token_ids"])
            drawn = [(int(one["token_id"]), float(one["logprob"])) for one in choice["logprobs"]["content"]]
            likely = [
                {int(one["token_id"]): float(one["logprob"]) for one in place["top_logprobs"]}
                for place in choice["logprobs"]["content"]
            ]
            drawn_by = {said["model"]}
            versions = [(span["version"], int(span["start"]), int(span["end"])) for span in choice["weight_versions"]]
        except (TypeError, KeyError, ValueError):
            raise _no_vllm(where) from None
        stopped = bool(ids) and ids[-1] in decoding.stop_ids
        kept = None
        wrong = _wrong(ids, drawn, stopped, decoding) or self._wrong_weights(drawn_by, versions, len(ids))
        if decoding.among_kept and decoding.cuts:
            kept = tuple(tuple(token for token, value in place.items() if value > _NEVER) for place in likely)
            if any(abs(sum(map(math.exp, place.values())) - 1) > _ROUNDING for place in likely):
                wrong = wrong or "only some of the tokens that could be sampled"
        if wrong:
            raise EnvironmentFault(Fault(where, f"returned {wrong}", "see the server's log", code="SF-SERVER"))
        return Rollout(tuple(prompt), ids, stopped, tuple(value for _, value in drawn), kept)

    def _wrong_weights(self, drawn_by: set[str], versions: list[tuple[str, int, int]], count: int) -> str | None:
        if drawn_by != {self._model}:
            return f"an answer of {', '.join(drawn_by)}, but {self._model} was requested"
        wanted = self._version or (versions[0][0] if versions else None)
        self._version = wanted  # of an adapter's base, which must not change
        told = sorted((start, end) for version, start, end in versions if version == wanted)
        if sum(end - start for start, end in told) != count:
            names = ", ".join(sorted({version for version, _, _ in versions})) or "no name"
            return f"tokens of weight version {names}, but {wanted} was requested"
        return None


def _no_vllm(where: str) -> EnvironmentFault:
    what = "returned no choices with token_ids, logprobs, model and weight_versions as in vLLM 0.32"
    return EnvironmentFault(Fault(where, what, "is it vLLM 0.32 or later?", code="SF-SERVER"))


def _served(server: Server) -> str:
    said = server.get("/v1/models")
    try:
        return str(said["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise EnvironmentFault(
            Fault(f"{server.address}/v1/models", "names no model", "is it a vLLM server?", code="SF-SERVER")
        ) from None


def _check_adapter(path: Path) -> None:
    if read_json(path).get("use_dora"):
        raise InputError(
            Fault(str(path), "is DoRA, which vLLM cannot serve", "use engine: embedded", code="SF-ADAPTER-DORA")
        )


def _seed(seed: int, place: int) -> int:
    """Return a separate 32-bit seed for each place, the same on every machine."""
    return int(np.random.SeedSequence((seed, place)).generate_state(1)[0])


def _wrong(ids: tuple[int, ...], drawn: Sequence[tuple[int, float]], stopped: bool, asked: Decoding) -> str | None:
    if not ids:
        return "no tokens"
    if len(ids) != len(drawn):
        return f"{len(ids)} tokens and {len(drawn)} log-probabilities"
    if ids != tuple(token for token, _ in drawn):
        return "log-probabilities of other tokens than the answer's"
    if len(ids) > asked.max_new_tokens:
        return f"{len(ids)} tokens, but at most {asked.max_new_tokens} were requested"
    if any(token in asked.stop_ids for token in ids[:-1]):
        return "tokens after a stop token"
    if not stopped and len(ids) < asked.max_new_tokens:
        return "fewer tokens than requested, without a stop token"
    if not all(math.isfinite(value) and _NEVER < value <= _ROUNDING for _, value in drawn):
        return "a log-probability that is NaN, infinite or positive"
    return None
