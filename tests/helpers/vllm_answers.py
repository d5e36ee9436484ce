"""Answers of a vLLM server, as `surefoot.models.vllm` reads them."""


def completion(ids, logprobs=None, *, model="base", version="default", likely=None, **changes):
    """Return an answer of vLLM 0.32's /inference/v1/generate.

    likely: log-probabilities by token at each position, besides the drawn one.
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
