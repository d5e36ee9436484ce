"""An opened model with the interface of lm-evaluation-harness: likelihoods, rolling likelihoods, generation.

It runs like `surefoot generate`: adapter, scaled BOS, dtype, masked left padding, and nothing from the model's
generation_config. Import this only if lm-eval is installed (`surefoot.evaluate.harness.tasks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]  # an extra

from surefoot.data.tokenize.segments import text_ids
from surefoot.evaluate.texts import last_tokens, rolling_windows
from surefoot.methods.open_model import OpenModel
from surefoot.models.beams import beam_answers
from surefoot.models.continuations import continuation_scores
from surefoot.models.generate import Decoding, decode
from surefoot.system.errors import Fault, InputError

_NEW_TOKENS = 256  # default of the harness' own models
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NO_PENALTY = ("repetition_penalty", 1)


class SurefootLM(TemplateLM):
    """A surefoot model for the harness. rows: sequences per forward pass."""

    def __init__(self, opened: OpenModel, rows: int):
        super().__init__()
        self._opened, self._rows = opened, rows
        self.tokenizer = opened.tokenizer
        self.batch_size = rows  # the harness records it in its results

    @property
    def eot_token_id(self) -> int:
        return self._opened.tokens.stop.value[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self._opened.encoder.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self._opened.positions

    @property
    def tokenizer_name(self) -> str:
        return self._opened.trained.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self._opened.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize with a single BOS at the start if the model uses one, whether or not the text contains it."""
        bos_id = None if add_special_tokens is False else self._opened.bos_id
        return text_ids(string, self._opened.encoder, bos_id)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the greedy one.

        requests: ((context, continuation), their ids). A too long context loses its beginning, after BOS.
        """
        pairs = []
        for _, context, continuation in requests:
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                what = f"a continuation has {len(continuation)} tokens, but the model only {self.max_length} positions"
                raise InputError(Fault("--tasks", what, "leave the task out", code="SF-DATA-LENGTH"))
            pairs.append((last_tokens(context, room, self._opened.bos_id), continuation))
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        # Longest first: little padding, and lack of memory shows at once.
        order = sorted(range(len(pairs)), key=lambda place: -sum(map(len, pairs[place])))
        for start in range(0, len(order), self._rows):
            places = order[start : start + self._rows]
            with self._opened.context():
                found = continuation_scores(
                    self._opened.model, [pairs[place] for place in places], pad_id=self._opened.pad_id
                )
            for place, score in zip(places, found, strict=True):
                scores[place] = score
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of whole texts in rolling windows: each token is predicted once, from as much context as
        fits."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            ids, bos = self.tok_encode(text), self._opened.bos_id
            rolling = rolling_windows(ids, self.max_length, prefix=self.prefix_token_id, bos_id=bos)
            found = [(None, *window) for window in rolling]
            windows += found
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        settings = [_settings(request.args[1]) for request in requests]
        answers = [""] * len(prompts)
        groups: dict[str, list[int]] = {}
        for place, generation in enumerate(settings):
            groups.setdefault(repr(generation), []).append(place)
        for places in groups.values():
            places.sort(key=lambda place: -len(prompts[place]))
            for start in range(0, len(places), self._rows):
                batch = places[start : start + self._rows]
                for place, text in zip(
                    batch, self._written([prompts[p] for p in batch], settings[batch[0]]), strict=True
                ):
                    answers[place] = text
        return answers

    def _written(self, prompts: Sequence[list[int]], generation: dict[str, Any]) -> list[str]:
        opened, new = self._opened, generation["new_tokens"]
        if (room := self.max_length - new) < 1:
            what = f"{new} new tokens leave no room for a prompt in the model's {self.max_length} positions"
            raise InputError(Fault("--tasks", what, "leave the task out", code="SF-DATA-LENGTH"))
        prompts = [last_tokens(prompt, room, opened.bos_id) for prompt in prompts]
        stops, until = opened.template.stop_ids, generation["until"]
        with opened.context():
            if generation["beams"] > 1:
                found = beam_answers(
                    opened.model,
                    opened.tokenizer,
                    prompts,
                    beams=generation["beams"],
                    max_new_tokens=new,
                    stop_ids=stops,
                    pad_id=opened.pad_id,
                )
                return [_before(answer.text, until) for answer in found]
            return self._until(
                prompts, Decoding(new, stops, opened.pad_id, generation["temperature"], generation["top_p"]), until
            )

    def _until(self, prompts: Sequence[list[int]], decoding: Decoding, until: Sequence[str]) -> list[str]:
        """Generate until every answer contains one of the stop texts."""
        ids: list[list[int]] = [[] for _ in prompts]
        texts = [""] * len(prompts)
        ended = [False] * len(prompts)
        for tokens in decode(self._opened.model, prompts, decoding):
            for place, token in enumerate(tokens):
                if ended[place]:
                    continue
                if token is None or token in decoding.stop_ids:
                    ended[place] = True
                    continue
                ids[place].append(token)
                texts[place] = str(self._opened.tokenizer.decode(ids[place], skip_special_tokens=True))
                ended[place] = any(stop in texts[place] for stop in until)
            if all(ended):
                break
        return [_before(text, until) for text in texts]


def _before(text: str, until: Sequence[str]) -> str:
    """The text before the first of these stop texts."""
    for stop in until:
        text = text.partition(stop)[0]
    return text


def _settings(generation: dict[str, Any]) -> dict[str, Any]:
    """Convert a task's generation_kwargs. Raises InputError for settings that surefoot's decoding does not have."""
    rest = dict(generation)
    until = rest.pop("until", None) or []
    lengths = [rest.pop(name) for name in _LENGTHS if name in rest]
    sampled = bool(rest.pop("do_sample", False))
    temperature, top_p = float(rest.pop("temperature", 1.0) or 0.0), float(rest.pop("top_p", 1.0))
    beams = int(rest.pop("num_beams", 1))
    unknown = [name for name, value in rest.items() if (name, value) != _NO_PENALTY]
    if unknown or (sampled and beams > 1):
        what = f"generation_kwargs has {', '.join(unknown) or 'sampling with beams'}, which surefoot does not support"
        raise InputError(
            Fault("--tasks", what, "leave the task out, or remove it from a copy of the task", code="SF-EVALUATE")
        )
    return {
        "until": [stop for stop in ([until] if isinstance(until, str) else until) if stop],
        "new_tokens": int(lengths[0]) if lengths else _NEW_TOKENS,
        "temperature": temperature if sampled else 0.0,
        "top_p": top_p,
        "beams": beams,
    }
