"""Query a model on an inference server: log-probabilities of token ids, token ids of a text or dialogue, and whether a
token ends its answers.

| server | log-probabilities of a prompt | ids of a dialogue |
|---|---|---|
| vLLM | /v1/completions with prompt_logprobs, also of the likeliest tokens in each place | /tokenize |
| SGLang | /generate with return_logprob | their number, by the usage of /v1/chat/completions |
| llama.cpp | /completion, one request per token, which a logit bias selects | /apply-template, then /tokenize |
| another with OpenAI's protocol | /v1/completions with echo | their number, as for SGLang |

`owned_by` in /v1/models identifies the server. Prompts are sent as token ids, so no tokenizer is involved.
Sources: vLLM 0.32 and llama.cpp b10605 (run), SGLang's native API (read).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.messages import first_few
from surefoot.system.posting import Server

_FORCED = 1000.0  # logit bias; larger than the differences of any model's logits
_PATH = "/v1/completions"
_SHOWN = 5  # names of models


@dataclass(frozen=True)
class ServedModel:
    """A model of a server.

    name: as requests call it.
    kind: owned_by of its server: vllm, sglang, llamacpp or another.
    longest: maximum tokens of prompt and answer; None if the server does not say.
    adapted: whether it is an adapter on another model of the server.
    adapters: whether the server has any.
    """

    server: Server
    name: str
    kind: str
    longest: int | None = None
    adapted: bool = False
    adapters: bool = False

    def prompt_logprobs(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return natural log-probabilities of every token but the first, given those before it.

        texts: token ids, at least two each.
        Raises EnvironmentFault unless the answer has one finite number for each.
        """
        ask = _LOGPROBS.get(self.kind, _by_echo)

        def one(ids: Sequence[int]) -> list[float]:
            try:
                found = [float(value) for value in ask(self, ids)]
            except (TypeError, KeyError, ValueError, IndexError):
                found = []
            if len(found) != len(ids) - 1 or not all(map(math.isfinite, found)):
                what = f"returns no log-probabilities of prompt tokens (the server reports {self.kind!r})"
                fix = "use vLLM, SGLang, llama.cpp, or a server that supports echo with logprobs"
                raise EnvironmentFault(Fault(self.server.address, what, fix, code="SF-SERVER"))
            return found

        # One after the other: vLLM 0.32 with adapters on a CPU crashes on two concurrent requests for prompt_logprobs.
        return [one(ids) for ids in texts]

    @property
    def version(self) -> str:
        """Of the server, as it calls it; "" if it does not say."""
        try:
            return str(self.server.get("/version")["version"])
        except (EnvironmentFault, TypeError, KeyError):
            return ""

    def likeliest(self, ids: Sequence[int], count: int) -> list[dict[int, float]]:
        """Return natural log-probabilities by token id for every place but the first, given the tokens before it: of
        the `count` likeliest tokens, and of the one that stands there. vLLM alone returns them.

        ids: at least two.
        Raises EnvironmentFault where the server refuses, or returns no numbers by token id.
        """
        try:
            found = _prompt_of_vllm(self, ids, count)
            return [{int(token): float(own["logprob"]) for token, own in place.items()} for place in found]
        except (TypeError, KeyError, ValueError, IndexError, AttributeError):
            what = f"returns no prompt_logprobs by token id (the server reports {self.kind!r})"
            raise EnvironmentFault(Fault(self.server.address, what, "use vLLM", code="SF-SERVER")) from None

    def text_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without added ones. Raises EnvironmentFault where the server returns none."""
        body = {"model": self.name, "prompt": text, "add_special_tokens": False}
        try:
            return _ids_of(self, body)
        except (TypeError, KeyError, ValueError):
            what = "returns no token ids from /tokenize"
            raise EnvironmentFault(Fault(self.server.address, what, "use vLLM", code="SF-SERVER")) from None

    def dialogue_ids(self, turns: Sequence[Mapping[str, str]]) -> list[int] | int | None:
        """Render turns on the server, with the generation prompt: token ids; only their number if it returns no ids;
        None if it refuses the turns, as a server without a chat template does.

        turns: role and content of each.
        """
        try:
            return _DIALOGUES.get(self.kind, _counted)(self, list(turns))
        except (EnvironmentFault, TypeError, KeyError, ValueError):
            return None

    def ends_with(self, ids: Sequence[int], token: int) -> bool:
        """Whether this token ends an answer; a logit bias makes the server choose it.

        ids: of a prompt.
        """
        reply = self.server.post(
            _PATH,
            {
                "model": self.name,
                "prompt": list(ids),
                "max_tokens": 2,
                "temperature": 0,
                "logit_bias": {str(token): 100 if self.kind != "llamacpp" else _FORCED},
            },
        )
        try:
            return reply["choices"][0]["finish_reason"] == "stop"
        except (TypeError, KeyError, IndexError):
            what = "returned no choices with finish_reason"
            raise EnvironmentFault(Fault(self.server.address + _PATH, what, code="SF-SERVER")) from None


def served_model(server: Server, name: str | None, key: str = "--name") -> ServedModel:
    """Return the model `name` of a server; None: its only model, or its only adapter.

    key: where the name is given, for faults.

    Raises InputError for an unknown name, or if there are several and no name.
    """
    where = f"{server.address}/v1/models"
    reply = server.get("/v1/models")
    try:
        models = {str(model["id"]): model for model in reply["data"]}
    except (TypeError, KeyError):
        models = {}
    if not models:
        raise EnvironmentFault(Fault(where, "names no model", "is it an inference server?", code="SF-SERVER"))
    adapters = [one for one, model in models.items() if model.get("parent")]
    if name is None:
        candidates = list(models) if len(models) == 1 else adapters
        if len(candidates) != 1:
            what = f"serves {len(models)} models: {first_few(list(models), _SHOWN)}"
            raise InputError(Fault(where, what, f"choose one with {key}", code="SF-USE-FLAG"))
        name = candidates[0]
    if name not in models:
        fix = f"it serves {first_few(list(models), _SHOWN)}"
        raise InputError(Fault(key, f"{where} has no model {name!r}", fix, code="SF-USE-FLAG"))
    own = models[name]
    under = models.get(str(own.get("parent")), {})
    longest = own.get("max_model_len") or under.get("max_model_len")
    return ServedModel(
        server,
        name,
        kind=str(own.get("owned_by") or "unknown"),
        longest=longest if isinstance(longest, int) else None,
        adapted=name in adapters,
        adapters=bool(adapters),
    )


def _of_vllm(model: ServedModel, ids: Sequence[int]) -> list[Any]:
    found = _prompt_of_vllm(model, ids, 0)
    return [one[str(token)]["logprob"] for token, one in zip(ids[1:], found, strict=True)]


def _prompt_of_vllm(model: ServedModel, ids: Sequence[int], count: int) -> list[Any]:
    """Entries by token id for every place but the first: of the likeliest `count` tokens, and of the one there."""
    body = {"model": model.name, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": count}
    return model.server.post(_PATH, body)["choices"][0]["prompt_logprobs"][1:]


def _of_sglang(model: ServedModel, ids: Sequence[int]) -> list[Any]:
    body = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    body |= {"lora_path": model.name} if model.adapted else {}  # the base's name would be looked up as an adapter
    found = model.server.post("/generate", body)["meta_info"]["input_token_logprobs"]
    if [one[1] for one in found] != list(ids):
        raise ValueError("other tokens")
    return [one[0] for one in found[1:]]


def _of_llamacpp(model: ServedModel, ids: Sequence[int]) -> list[Any]:
    """llama.cpp returns no log-probabilities of prompts. It returns that of a chosen token, before the bias, and caches
    the prompt, so each token costs one decoding step."""

    def next_token(place: int) -> Any:
        body = {"prompt": list(ids[:place]), "n_predict": 1, "n_probs": 1, "temperature": 0, "cache_prompt": True}
        body |= {"logit_bias": [[ids[place], _FORCED]], "ignore_eos": False, "return_tokens": True}
        reply = model.server.post("/completion", body)
        (found,) = reply.get("completion_probabilities") or reply["probs"]
        if found["id"] != ids[place]:
            raise ValueError("another token")
        return found["logprob"]

    return [next_token(place) for place in range(1, len(ids))]


def _by_echo(model: ServedModel, ids: Sequence[int]) -> list[Any]:
    body = {"model": model.name, "prompt": list(ids), "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    found = model.server.post(_PATH, body)["choices"][0]["logprobs"]["token_logprobs"]
    if len(found) not in (len(ids), len(ids) + 1):  # including added tokens
        raise ValueError("other tokens")
    return found[1 : len(ids)]


def _tokenized(model: ServedModel, turns: list[Mapping[str, str]]) -> list[int]:
    return _ids_of(model, {"model": model.name, "messages": turns, "add_generation_prompt": True})


def _ids_of(model: ServedModel, body: Mapping[str, Any]) -> list[int]:
    return [int(token) for token in model.server.post("/tokenize", body)["tokens"]]


def _templated(model: ServedModel, turns: list[Mapping[str, str]]) -> list[int]:
    """Tokenize like llama.cpp's chat: the rendered text, with BOS if the model's metadata require it."""
    text = model.server.post("/apply-template", {"messages": turns})["prompt"]
    body = {"content": text, "add_special": True, "parse_special": True}
    return [int(token) for token in model.server.post("/tokenize", body)["tokens"]]


def _counted(model: ServedModel, turns: list[Mapping[str, str]]) -> int:
    body = {"model": model.name, "messages": turns, "max_tokens": 1, "temperature": 0}
    return int(model.server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"])


_LOGPROBS: dict[str, Callable[[ServedModel, Sequence[int]], list[Any]]] = {
    "vllm": _of_vllm,
    "sglang": _of_sglang,
    "llamacpp": _of_llamacpp,
}
_DIALOGUES: dict[str, Callable[[ServedModel, list[Mapping[str, str]]], list[int] | int]] = {
    "vllm": _tokenized,
    "llamacpp": _templated,
}
