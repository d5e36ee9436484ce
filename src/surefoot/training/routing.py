"""Expert loads and the load-balancing loss of mixture-of-experts models.

The loss is that of Switch Transformer (Fedus et al. 2021, eq. 4 to 6), computed over all layers together as in
transformers' `load_balancing_loss_func`:

    aux = E * sum over experts i of  f_i * P_i

f_i is the number of times that expert i is among a token's top k, and P_i the sum of its router probabilities, both
divided by N, the number of routed tokens of all layers. Here N, f and P cover the whole optimizer step: all
micro-batches and ranks, without padding. transformers computes them per forward pass; since the loss is a product of
two means, its value and gradient then depend on how the step is split. f has no gradient but must be known before the
first backward pass, so each step first runs its forward passes once for routing, which costs one extra forward pass.

A router is a module that returns its logits first and, after them, the indices of the chosen experts (integers [T, k]),
as in transformers.

Shapes: T tokens of a forward pass, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from surefoot.data.batching.batch import Batch, numbers_on
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.report import Load

AUX_LOSS = "aux_loss"  # name of the step metric


@dataclass(frozen=True)
class Balance:
    """Routing statistics of the whole step.

    coefficient: coefficient of the loss.
    chosen: [E], how often each expert is in a token's top k.
    rows: number of tokens times layers.
    """

    coefficient: float
    chosen: torch.Tensor
    rows: float


@dataclass
class RouterOutputs:
    """Router outputs of one forward pass: router name -> logits [T, E] and indices [T, k] of each call."""

    logits: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    indices: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class Routing:
    """Observes a model's routers.

    routers: layer -> router module.
    coefficient: coefficient of the load-balancing loss; 0 only counts loads.
    """

    def __init__(self, routers: Mapping[str, nn.Module], coefficient: float = 0.0):
        self._routers, self.coefficient = routers, coefficient
        self._counted: dict[str, torch.Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[RouterOutputs]:
        """Context that records the router outputs of forward passes with gradients. Run backward outside of it: layers
        recomputed by gradient checkpointing would be recorded twice."""
        seen = RouterOutputs()

        def hook(name: str) -> Any:
            def see(module: nn.Module, given: object, output: Any) -> None:
                if not (torch.is_grad_enabled() and isinstance(output, tuple)):
                    return
                # Compute nothing here: a recomputed layer must save the same number of tensors as the first time.
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
    def count(self, seen: RouterOutputs, rows: Batch) -> None:
        """Add a forward pass to the loads, without padding."""
        for name, calls in seen.indices.items():
            for logits, index in zip(seen.logits[name], calls, strict=True):
                experts = logits.shape[-1]
                chosen = index.reshape(-1, index.shape[-1])
                real = _real(rows, len(chosen), index.device).repeat_interleave(chosen.shape[1])
                # Whole numbers: fp32 counts them exactly up to 2^24, in whatever order a GPU adds them.
                dtype = torch.float64 if real.device.type == "cpu" else torch.float32
                found = torch.zeros(experts, dtype=dtype, device=real.device)
                found.index_add_(0, chosen.reshape(-1), real.to(dtype))
                self._counted[name] = self._counted[name] + found if name in self._counted else found

    def take(self) -> dict[str, list[float]]:
        """Return this rank's loads since the last call and reset them. Synchronizes host and device, once."""
        counted, self._counted = self._counted, {}
        names = [name for name in self._routers if name in counted]
        if not names:
            return {}
        loads = iter(torch.cat([counted[name] for name in names]).tolist())
        return {name: list(islice(loads, len(counted[name]))) for name in names}

    def tally(self, seen: RouterOutputs, rows: Batch) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return f, P and N of one forward pass, as sums; P has a gradient. Raises EnvironmentFault if padding cannot
        be distinguished from tokens."""
        chosen = probability = torch.zeros(())
        count = 0.0
        for name, index in seen.indices.items():
            for logits, top in zip(seen.logits[name], index, strict=True):
                if len(logits) < rows.tokens:
                    what = f"{name} routes {len(logits)} of {rows.tokens} tokens in one pass"
                    raise EnvironmentFault(Fault(_KEY, what, "set it to 0", code="SF-CONFIG-CONFLICT"))
                share = logits.float().softmax(dim=-1)
                real = _real(rows, len(share), share.device)
                # As transformers counts: by probability. A router may have chosen by other scores, such as with a bias.
                likeliest = share.detach().topk(top.shape[-1], dim=-1).indices
                once = torch.zeros_like(share).scatter_(1, likeliest, 1.0)
                chosen = chosen + (once * real.unsqueeze(1)).sum(dim=0)
                probability = probability + (share * real.unsqueeze(1)).sum(dim=0)
                count += rows.tokens
        return chosen, probability, count


_KEY = "model.router_aux_loss_coef"


def aux_loss(balance: Balance, probability: torch.Tensor) -> torch.Tensor:
    """Return one forward pass's contribution to the step's load-balancing loss, without the coefficient.

    probability: P of `Routing.tally`."""
    return len(balance.chosen) * (balance.chosen.to(probability) * probability).sum() / balance.rows**2


def _real(rows: Batch, count: int, device: torch.device) -> torch.Tensor:
    """Return [count]: 1.0 for each real token of the pass and 0.0 for padding, row by row."""
    if not rows.lengths:  # a blank batch
        return torch.zeros(count, device=device)
    tokens = rows.input_ids.numel()
    if count < tokens:  # the last layer computes only the positions that are used (`surefoot.models.fast.last_block`)
        return torch.ones(count, device=device)
    if rows.documents:  # one packed row with padding at its end
        return (torch.arange(count, device=device) < rows.tokens).float()
    if rows.attention_mask is not None:
        return rows.attention_mask.reshape(-1).to(device).float()
    length = numbers_on(device, rows.lengths).unsqueeze(1)
    return (torch.arange(rows.input_ids.shape[1], device=device) < length).reshape(-1).float()


def spread(load: Load) -> dict[str, float]:
    """Return a step's load metrics: the busiest expert's load relative to an even share, and the number of idle
    experts."""
    loads = [counts for counts in load.values() if sum(counts)]
    if not loads:
        return {}
    busiest = max(max(counts) * len(counts) / sum(counts) for counts in loads)
    return {"expert_busiest": busiest, "experts_idle": float(sum(counts.count(0) for counts in loads))}
