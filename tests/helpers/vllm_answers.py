"""What a vLLM server says, as `surefoot.models.vllm` reads it."""

from __future__ import annotations


def completion(ids, logprobs=None, *, model="base", version="default", likely=None, **changes):
    """As vLLM 0.32 answers /inference/v1/generate.

    likely: of each place, by token, what is told beside the drawn one.
    """
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    likely = likely or [{token: value} for token, value in zip(ids, logprobs, strict=False)]
    content = [
        {
            "token_id": token,
            "logprob": value,
            "top_logprobs": [{"token_id": one, "logprob": its} for one, its in place.items()],
        }
        for token, value, place in zip(ids, logprobs, likely, strict=False)
    ]
    spans = [{"version": version, "start": 0, "end": len(ids)}]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans, **changes}
    return {"model": model, "choices": [choice]}
