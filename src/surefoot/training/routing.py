"""Where a mixture's routers send tokens: the load of each expert, and the loss that keeps the loads alike.

The loss is the one of Switch Transformer (Fedus et al. 2021, eq. 4 to 6) as transformers' `load_balancing_loss_func`
has it, over all layers together:

    aux = E * sum over experts i of  f_i * P_i

f_i is the number of times that i is among a token's k likeliest experts, and P_i the sum of its probabilities, both
divided by N, the routed tokens of all layers. Here N, f and P are those of the whole optimizer step: of all
micro-batches and ranks, without padding. transformers takes one forward pass for all; a product of two means is another
number for each way to split the step, and its gradient as well. f has no gradient, so it has to be known before the
first backward pass: a step of several micro-batches is routed once beforehand, which costs one more forward pass.

A router here is a module that gives its logits first and, behind them, the experts that it chose ([T, k], whole
numbers), as those of transformers do.

Shapes: T tokens of a forward pass, E experts, k of them for a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from surefoot.data.batching.batch import Batch
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.report import Load

AUX_LOSS = "aux_loss"  # among a step's metrics


@dataclass(frozen=True)
class Balance:
    """Of the whole step.

    coefficient: of the loss.
    chosen: [E], how often each expert was chosen.
    rows: tokens times layers.
    """

    coefficient: float
    chosen: torch.Tensor
    rows: float


@dataclass
class Seen:
    """One forward pass. logits: [T, E] of every call of a router, by its name; indices: [T, k]."""

    logits: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    indices: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Routing:
    """Looks on as a model's routers decide.

    routers: by layer.
    coefficient: of the loss; 0 where loads are counted alone.
    """

    def __init__(self, routers: Mapping[str, nn.Module], coefficient: float = 0.0):
        self._routers, self.coefficient = routers, coefficient
        self._counted: dict[str, torch.Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        """Inside, forward passes that have a gradient are seen. Their backward passes are not for inside: layers that
        are computed again would be seen twice."""
        seen = Seen()

        def hook(name: str) -> Any:
            def see(module: nn.Module, given: object, output: Any) -> None:
                if not (torch.is_grad_enabled() and isinstance(output, tuple)):
                    return
                # Nothing is computed here: a layer that is computed again has to save as many tensors.
                tables = [one for one in output if isinstance(one, torch.Tensor) and one.ndim == 2]
                chosen = [one for one in tables if not one.is_floating_point()]
                if chosen and tables[0].is_floating_point():
                    seen.logits.setdefault(name, []).append(tables[0])
                    seen.indices.setdefault(name, []).append(chosen[-1])

            return see

        handles = [module.register_forward_hook(hook(name)) for name, module in self._routers.items()]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def count(self, seen: Seen, rows: Batch) -> None:
        """Add the real tokens of a forward pass to the loads."""
        for name, calls in seen.indices.items():
            for logits, index in zip(seen.logits[name], calls, strict=True):
                experts = logits.shape[-1]
                chosen = index.reshape(-1, index.shape[-1])
                real = _real(rows, len(chosen), index.device).repeat_interleave(chosen.shape[1])
                found = torch.zeros(experts, dtype=torch.float64 if real.device.type == "cpu" else torch.float32)
                found = found.to(real.device).index_add_(0, chosen.reshape(-1), real.to(found.dtype))
                self._counted[name] = self._counted[name] + found if name in self._counted else found

    def take(self) -> dict[str, list[float]]:
        """The loads since the last call, of this rank. The host waits for the device."""
        counted, self._counted = self._counted, {}
        return {name: counted[name].tolist() for name in self._routers if name in counted}

    def tally(self, seen: Seen, rows: Batch) -> tuple[torch.Tensor, torch.Tensor, float]:
        """f, P and N of one forward pass, as sums; P has a gradient. Raises EnvironmentFault where padding cannot be
        told from tokens."""
        chosen = probability = torch.zeros(())
        count = 0.0
        for name, index in seen.indices.items():
            for logits, top in zip(seen.logits[name], index, strict=True):
                if len(logits) < rows.tokens:
                    what = f"{name} routes {len(logits)} of {rows.tokens} tokens in one pass"
                    raise EnvironmentFault(Fault(_KEY, what, "set it to 0", code="SF-CONFIG-CONFLICT"))
                share = logits.float().softmax(dim=-1)
                real = _real(rows, len(share), share.device)
                likeliest = share.detach().topk(top.shape[-1], dim=-1).indices
                once = torch.zeros_like(share).scatter_(1, likeliest, 1.0)
                chosen = chosen.to(share.device) + (once * real.unsqueeze(1)).sum(dim=0)
                probability = probability.to(share.device) + (share * real.unsqueeze(1)).sum(dim=0)
                count += rows.tokens
        return chosen, probability, count


_KEY = "model.router_aux_loss_coef"


def aux_loss(balance: Balance, probability: torch.Tensor) -> torch.Tensor:
    """What one forward pass adds to the step's loss, before the coefficient. probability: see `Routing.tally`."""
    return len(balance.chosen) * (balance.chosen.to(probability) * probability).sum() / balance.rows**2


def _real(rows: Batch, count: int, device: torch.device) -> torch.Tensor:
    """[count], 1.0 for each token of the pass that is no padding, row by row."""
    tokens = rows.input_ids.numel()
    if count < tokens:  # of the last layer, what is read (`surefoot.models.fast.last_block`)
        return torch.ones(count, device=device)
    if rows.documents:  # one row, and behind it what fills it up
        return (torch.arange(count, device=device) < rows.tokens).float()
    if rows.attention_mask is not None:
        return rows.attention_mask.reshape(-1).to(device).float()
    length = torch.tensor(rows.lengths, device=device).unsqueeze(1)
    return (torch.arange(rows.input_ids.shape[1], device=device) < length).reshape(-1).float()


def spread(load: Load) -> dict[str, float]:
    """Of a step: how many times its even share the busiest expert of any layer has, and how many experts have none."""
    loads = [counts for counts in load.values() if sum(counts)]
    if not loads:
        return {}
    busiest = max(max(counts) * len(counts) / sum(counts) for counts in loads)
    return {"expert_busiest": busiest, "experts_idle": float(sum(counts.count(0) for counts in loads))}
