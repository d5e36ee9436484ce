"""Write trl_grpo.json: what TRL's own GRPO and RLOO make of one batch of log-probabilities.

Run by hand, with the interpreter of an environment that has TRL (1.16 when this was last done):

    PYTHONPATH=tests OTHER/bin/python tests/equality/make_trl_grpo.py

Its trainers' `_compute_loss` is called as it is, on a trainer that answers with the given log-probabilities in place of
a model's; what it writes are the loss and its gradient by them. TRL's epsilon_high of CISPO is the bound itself, 1 more
than surefoot's clip_high. Advantages are computed as the lines of `_generate_and_score_completions` do; those lines of
it that compute the weights of a correction are run as they stand.
"""

import inspect
import json
import math
import textwrap
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import nanstd

from equality.group_answers import BOUNDS, CASES, CORRECTED, DRAWN, ENGINE, GROUP, LIMIT, POLICY, REFERENCE, REWARDS

OWN = {"gspo": "grpo"}  # TRL's loss_type, where it has another name


def table(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([[*row, *[0.0] * (LIMIT - len(row))] for row in rows], dtype=torch.float32)


class Accelerator:
    num_processes = 1

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values


def advantages(loss: str) -> torch.Tensor:
    rewards = torch.tensor(REWARDS)
    groups = rewards.view(-1, GROUP)
    if loss == "rloo":
        return rewards - ((groups.sum(1, keepdim=True) - groups) / (GROUP - 1)).view(-1)
    mean = groups.mean(1).repeat_interleave(GROUP)
    if loss == "dr_grpo":
        return rewards - mean
    return (rewards - mean) / (nanstd(groups, dim=1).repeat_interleave(GROUP) + 1e-4)


def weights(correction: str, mask: torch.Tensor) -> torch.Tensor:
    lines = inspect.getsource(GRPOTrainer._generate_and_score_completions).splitlines()
    first = next(number for number, line in enumerate(lines) if "(old_per_token_logps - sampling_per" in line)
    last = next(number for number, line in enumerate(lines) if number > first and "raise ValueError(" in line)
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=correction,
            vllm_importance_sampling_clip_min=BOUNDS[0],
            vllm_importance_sampling_clip_max=BOUNDS[1],
        ),
        "mask": mask,
        "old_per_token_logps": table(DRAWN),
        "sampling_per_token_logps": table(ENGINE),
    }
    exec(textwrap.dedent("\n".join(lines[first : last - 1])), names)  # without its last branch
    return names["vllm_importance_sampling_ratio"]


def case(loss: str, low: float | None, high: float, kl: float, correction: str | None = None) -> dict[str, Any]:
    logprobs = table(POLICY).requires_grad_()
    mask = torch.tensor([[1] * len(row) + [0] * (LIMIT - len(row)) for row in POLICY])
    prompts = torch.zeros(len(POLICY), 1, dtype=torch.long)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=OWN.get(loss, loss),
        importance_sampling_level="sequence" if loss == "gspo" else "token",
        epsilon_low=low,
        epsilon_high=1 + high if low is None else high,
        beta=kl,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
    )
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": advantages(loss),
        "old_per_token_logps": table(DRAWN),
        "old_logps": (table(DRAWN) * mask).sum(1),
        "ref_per_token_logps": table(REFERENCE),
        "num_items_in_batch": mask.sum().float(),
    }
    if correction is not None:
        inputs["importance_sampling_ratio"] = weights(correction, mask)
    own = RLOOTrainer if loss == "rloo" else GRPOTrainer
    value = own._compute_loss(trainer, None, inputs)
    value.backward()
    assert logprobs.grad is not None
    rows = [row[: len(own)].tolist() for row, own in zip(logprobs.grad, POLICY, strict=True)]
    return {"advantages": advantages(loss).tolist(), "loss": float(value.detach()), "gradient": rows}


if __name__ == "__main__":
    found = {
        "versions": {name: version(name) for name in ("trl", "torch")},
        "cases": {name: case(*words) for name, words in CASES.items()}
        | {name: case(*CASES[of], kind) for name, (of, kind) in CORRECTED.items()},
    }
    (Path(__file__).parent / "trl_grpo.json").write_text(json.dumps(found, indent=1) + "\n")
