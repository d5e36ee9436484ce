"""Evaluation of a policy in PPO: the mean score of its likeliest answers to held-out prompts.

The loss of such an evaluation is the negative mean score, so that the lowest loss is the best policy, as everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from surefoot.methods.method import Measured
from surefoot.methods.ppo.rollout import Asked, Weighing, Write, answer_and_weigh
from surefoot.training.report import EvalReport


def evaluate_answers(
    step: int,
    asked: Asked,
    write: Write,
    how: Weighing,
    tokenizer: PreTrainedTokenizerBase,
    give_up: Callable[[], bool],
) -> Measured | None:
    """write: takes the likeliest tokens. Answers are written and scored in one go: a signal is heard before it."""
    if give_up():
        return None
    started = time.perf_counter()
    weighed = answer_and_weigh(asked, write, how, temperature=1.0)
    scores, lengths = weighed.scores.double(), weighed.lengths.double()
    known = scores.isfinite()
    reward = float(scores[known].mean()) if known.any() else float("nan")
    kl = (weighed.logprobs - weighed.reference).where(weighed.real, 0.0).sum(dim=1).double().mean()
    report = EvalReport(
        step=step,
        loss=-reward,
        perplexity=None,
        accuracy=None,
        weight=int(lengths.sum()),
        seconds=time.perf_counter() - started,
        metrics={
            "reward": reward,
            "kl": float(kl),
            "response_length": float(lengths.mean()),
            "ended": sum(answer.stopped for answer in weighed.answers) / len(weighed.answers),
        },
        unit="response_tokens",
    )
    samples = [
        (str(tokenizer.decode(list(one.prompt))), str(tokenizer.decode(list(one.response), skip_special_tokens=True)))
        for one in weighed.answers
    ]
    return Measured(report, samples)
