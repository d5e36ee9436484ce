"""DeepSpeed engine: ZeRO shards moments (stage 1), gradients (2) and weights (3) over the ranks.

DeepSpeed only communicates gradients and weights; surefoot defines the step. DeepSpeed's mean over ranks is undone
(losses are already divided by the weight over all ranks), gradients accumulate until `reduce`, and it neither clips nor
scales. Its optimizer is wrapped in a gate that only `apply` opens: after a step that the guard rejects, DeepSpeed's own
step runs with the gate closed, which clears its buffers and updates nothing; it also takes the gradients for overflown,
because it would write its fp32 weights into the model. Its checkpoints are pickles and are
not used; moments are saved and loaded by name.

The optimizer sees flat pieces instead of matrices, so only elementwise optimizers can be used.

Written for the DeepSpeed version in `constraints.txt`, because it uses private names of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from surefoot.system.libraries import import_deepspeed
from surefoot.training.engine.base import (
    ALL,
    Elements,
    Engine,
    Groups,
    Members,
    PerGroup,
    clip,
    groups_of,
    norms_of_shares,
    of_group,
    set_rates,
)
from surefoot.training.engine.sharding import elementwise, require_shareable, whole_parameters
from surefoot.training.engine.zero_hooks import fetch_by_layer, overflown, reduce_by_parameter, reduce_in_order
from surefoot.training.engine.zero_shares import (
    Share,
    own_part,
    put_state,
    share_of_parameter,
    share_of_row,
    whole_state,
)
from surefoot.training.optimizer import Optimizer, parts_of, trainable_parameters
from surefoot.training.ranks import Ranks
from surefoot.training.state import LossScale


class DeepSpeedEngine(Engine):
    """One ZeRO stage. There is no replica check: moments exist once, and weights are sent to all ranks after each step.

    Raises InputError for an optimizer that is not elementwise, for quantized weights, and if DeepSpeed is missing.
    """

    def __init__(
        self,
        model: nn.Module,
        members: Members,
        make_optimizer: Callable[[Groups], Optimizer],
        ranks: Ranks,
        device: torch.device,
        *,
        stage: Literal[1, 2, 3],
        offload: Literal["none", "optimizer", "all"],
    ):
        deepspeed = import_deepspeed(device.type)
        require_shareable(model, "deepspeed")
        self.model, self.device, self.ranks = model, device, ranks
        self.parameters: Mapping[str, nn.Parameter] = trainable_parameters(model)
        self.groups = groups_of(model, members)
        self._shapes = {name: one.shape for name, one in self.parameters.items()}
        self._stage, self._offload = stage, offload != "none"
        self._gate = Gate(elementwise(make_optimizer(self.groups), "deepspeed"))
        self.optimizer: Optimizer = self._gate  # pyright: ignore[reportAttributeAccessIssue]
        if stage == 3:
            fetch_by_layer(deepspeed, model)
        self.config = deepspeed_config(
            stage=stage,
            offload=offload,
            world=ranks.world,
            trained=sum(shape.numel() for shape in self._shapes.values()),
            pinned=device.type == "cuda",
        )
        self._deepspeed = deepspeed
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=self._gate, config=self.config, dist_init_required=False
        )
        self._zero = self._engine.optimizer
        self._hooks = reduce_by_parameter(self._zero) if stage == 3 else []
        if stage == 2:
            reduce_in_order(self._zero, list(self.parameters.values()))
        self._pending = False  # whether there are gradients since the last step
        self._reduced = False
        self._forget()

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        # DeepSpeed's own forward would do these two, but methods call the model directly.
        self._zero.clear_backward_seen_flag()
        self._engine._backward_prologue()
        # DeepSpeed averages over ranks; multiply by the world size to get sums.
        factor = self.world if scale is None else self.world * scale.scale
        self._engine.backward(loss * factor, scale_wrt_gas=False)
        self._pending, self._reduced = True, False

    def reduce(self) -> None:
        # Stage 1 has kept whole gradients until now. The others have reduced theirs in the backward passes.
        if self._stage == 1:
            self._zero.set_gradient_accumulation_boundary(True)
            self._zero.reduce_gradients()
        else:
            self._zero.finalize_gradient_accumulation_boundary()
        self._reduced = True

    def unscale(self, scale: LossScale | None) -> None:
        if scale is not None:
            everything = [tensor for tensors in self._own_gradients().values() for tensor in tensors]
            torch._foreach_mul_(everything, 1.0 / scale.scale)  # pyright: ignore[reportPrivateImportUsage]

    def grad_norms(self) -> dict[str, torch.Tensor]:
        return norms_of_shares(self._own_gradients(), self.ranks, self.device)

    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        for name, tensors in self._own_gradients().items():
            if (limit := of_group(max_grad_norm, name)) is not None:
                clip(tensors, limit, norms[name])
        set_rates(self.optimizer, lr)
        with self._gate.opened():
            self._zero.step()
        self._forget()

    def discard(self) -> None:
        if not self._pending:
            return  # DeepSpeed's step requires a backward pass before it
        if not self._reduced:
            self.reduce()
        with overflown(self._zero, self._stage):
            self._zero.step()  # the gate is closed: clears buffers, updates nothing
        self._forget()

    def gradients(self) -> Mapping[str, torch.Tensor]:
        if not (self._pending and self._reduced):
            return {}
        own = self._own_gradients()
        return {f"{name} [{number}]": tensor for name, tensors in own.items() for number, tensor in enumerate(tensors)}

    def weights(self) -> Mapping[str, torch.Tensor]:
        if self._stage < 3:
            return self.parameters
        cut: Mapping[str, Any] = self.parameters
        return {name: own_part(one.ds_tensor, one.ds_numel, self.rank) for name, one in cut.items()}

    def computed_with(self) -> Mapping[str, tuple[torch.Size, torch.Tensor]]:
        return {name: (self._shapes[name], one.detach()) for name, one in self.weights().items()}

    def moments(self) -> Mapping[str, torch.Tensor]:
        return {
            f"flat {number}/{entry}": value
            for number, state in enumerate(self._states())
            for entry, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def gather_state(self) -> dict[str, torch.Tensor]:
        return whole_state(self._shares(), self._states(), self.ranks, self.device)

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        put_state(self._shares(), self._flats(), self._states(), tensors, self.ranks)

    def gathered(self, frozen: bool = True) -> AbstractContextManager[None]:
        if self._stage < 3:
            return nullcontext()
        return whole_parameters(self.model, self._whole, keep=self.ranks.is_first, frozen=frozen)

    def elements(self) -> Elements:
        trained = sum(shape.numel() for shape in self._shapes.values())
        kept = sum(flat.numel() for flat in self._flats())
        if self._stage == 3:
            held = sum(one.numel() + one.ds_tensor.numel() for one in self.model.parameters())  # pyright: ignore[reportAttributeAccessIssue]
        else:
            held = sum(one.numel() for one in self.model.parameters())
        return Elements(held, trained if self._stage == 1 else kept, kept)

    def release(self) -> None:
        """Remove references that would keep the model alive: Python's garbage collector cannot see gradient hooks of
        parameters, and DeepSpeed's global stack of running modules keeps the model of every stage 3 engine."""
        for hook in self._hooks:
            hook.remove()
        self._engine.destroy()
        running = self._deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK
        running[:] = [module for module in running if module is not self.model]

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _own_gradients(self) -> dict[str, list[torch.Tensor]]:
        """Return group -> this rank's part of the reduced gradients."""
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self.groups}
        for index, flat in enumerate(self._flats()):
            group = index if self._stage < 3 else self._zero.sub_group_to_group_id[index]
            name = self.optimizer.param_groups[group].get("name", ALL)
            own = [flat.grad] if self._offload else self._zero.averaged_gradients[index]
            found[name] += [tensor for tensor in own if tensor is not None]
        return found

    def _forget(self) -> None:
        """Reset after a step. Buffers of gradients (in host memory, and that of stage 3) would keep old gradients of
        parameters that the next step, or its first micro-batch, does not use."""
        if self._stage == 3:
            self._zero.grad_partitions_flat_buffer.zero_()
        if self._offload:
            added = {} if self._stage == 3 else self._zero.accumulated_grads_in_cpu
            for kept in (*(flat.grad for flat in self._flats()), *added.values()):
                if kept is not None:
                    kept.zero_()
        self._pending = self._reduced = False

    def _flats(self) -> list[torch.Tensor]:
        zero = self._zero
        return zero.single_partition_of_fp32_groups if self._stage < 3 else zero.fp32_partitioned_groups_flat

    def _states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state[flat] for flat in self._flats()]

    def _shares(self) -> dict[str, Share]:
        zero, found = self._zero, {}
        if self._stage == 3:
            for name, one in self.parameters.items():
                flat, place, _ = zero.grad_position[zero.get_param_id(one)]
                found[name] = share_of_parameter(flat, place, self._shapes[name], one.partition_numel(), self.ranks)  # pyright: ignore[reportAttributeAccessIssue]
            return found
        names = {id(one): name for name, one in self.parameters.items()}
        for flat, (row, starts) in enumerate(
            zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
        ):
            for one, start in zip(row, starts, strict=True):
                name = names[id(one)]
                found[name] = share_of_row(flat, start, self._shapes[name], zero.partition_size[flat], self.ranks)
        return {name: found[name] for name in self.parameters}


class Gate(torch.optim.Optimizer):
    """Wraps the run's optimizer for DeepSpeed: steps the groups that DeepSpeed selects, and only while open."""

    def __init__(self, inner: Optimizer):
        self._parts = parts_of(inner)
        self.defaults: dict[str, Any] = {}
        self.param_groups = inner.param_groups
        self.state = inner.state
        self._open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._open:
            return
        for part in self._parts:
            groups = part.param_groups
            part.param_groups = [
                group for group in groups if any(group is requested for requested in self.param_groups)
            ]
            part.step()
            part.param_groups = groups


_BUCKET = 500_000_000  # elements per message; DeepSpeed's default
_NEVER = 2**31 - 1


def deepspeed_config(
    *, stage: Literal[1, 2, 3], offload: Literal["none", "optimizer", "all"], world: int, trained: int, pinned: bool
) -> dict[str, Any]:
    """Return DeepSpeed's config.

    stage: ZeRO stage.
    offload: what to keep in host memory.
    trained: number of trainable elements.
    pinned: whether to use page-locked host memory.

    Features that surefoot's step implements itself are off: accumulation, clipping, loss scaling, dtypes. Under ZeRO 3
    every weight is sharded, however small, and freed as soon as its module has run. Prefetching is off, because
    DeepSpeed predicts the order of modules from the last step, and methods call the model in varying orders (rollouts,
    references, evaluations).
    """
    place = {"device": "cpu", "pin_memory": pinned}
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": False,
        "reduce_scatter": True,
        "reduce_bucket_size": max(1, min(_BUCKET, trained)),  # a buffer of this size is allocated
    }
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
    if offload != "none":
        zero["offload_optimizer"] = place
    if offload == "all":
        zero["offload_param"] = place
    return {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER,
    }
