"""Write trl_distill.json: what TRL's own distillation losses make of two tables of logits.

Run by hand, with the interpreter of an environment that has TRL (1.16 when this was last done):

    PYTHONPATH=tests OTHER/bin/python tests/equality/make_trl_distill.py

`GKDTrainer.generalized_jsd_loss` is called as it is. "likeliest" are the functions with which its trainer of served
teachers compares the KEPT likeliest tokens and a bucket of all others.
"""

import json
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

from equality.distilled_logits import BETAS, KEPT, LABELS, STUDENT, TEACHER, TEMPERATURES


def whole(beta: float, temperature: float) -> dict[str, Any]:
    student = torch.tensor(STUDENT)[None].requires_grad_()
    loss = GKDTrainer.generalized_jsd_loss(
        student, torch.tensor(TEACHER)[None], torch.tensor(LABELS)[None], beta, temperature
    )
    loss.backward()
    assert student.grad is not None
    return {"loss": float(loss.detach()), "gradient": student.grad[0].tolist()}


def likeliest(beta: float) -> dict[str, Any]:
    student, teacher = torch.tensor(STUDENT).requires_grad_(), torch.tensor(TEACHER).log_softmax(-1)
    logprobs, tokens = teacher.topk(KEPT)
    seen = torch.ones_like(tokens, dtype=torch.bool)
    ours, support = _add_tail_bucket(student.log_softmax(-1).gather(-1, tokens), seen)
    theirs, _ = _add_tail_bucket(logprobs, seen)
    learned = torch.tensor(LABELS) != -100
    loss = _jsd_divergence(ours, theirs, beta, support)[learned].sum() / learned.sum()
    loss.backward()
    assert student.grad is not None
    return {"loss": float(loss.detach()), "gradient": student.grad.tolist()}


if __name__ == "__main__":
    found = {
        "versions": {name: version(name) for name in ("trl", "torch")},
        "whole": {f"{beta} {one}": whole(beta, one) for beta, one in product(BETAS, TEMPERATURES)},
        "likeliest": {f"{beta}": likeliest(beta) for beta in BETAS},
    }
    (Path(__file__).parent / "trl_distill.json").write_text(json.dumps(found, indent=1) + "\n")
