"""ZeRO by DeepSpeed: moments (1), gradients (2) and weights (3) shared out over the ranks.

DeepSpeed moves gradients and weights; what a step is stays ours. Its mean over ranks is undone (losses are divided by
the weight of all ranks already), it accumulates until `reduce` ends the step, it neither clips nor scales, and the
optimizer it steps is wrapped in a gate that only `apply` opens: a step that the guard refused goes through DeepSpeed's
own clearing up, and moves nothing. Its checkpoints are pickles and are not used: moments go in and out by name.

Optimizers see flat pieces, not matrices, so only those that treat each element alone can be used.

Written for the DeepSpeed that `constraints.txt` names; it reads names that are not DeepSpeed's public ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from surefoot.models.decoder import decoder_layers
from surefoot.models.forward import language_models
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
)
from surefoot.training.engine.sharding import elementwise, require_shareable, whole_parameters
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
    """ZeRO of one stage. Replicas need no check: moments are held once, and weights are sent to all ranks after every
    step.

    Raises InputError for an optimizer that needs whole matrices, for quantised weights, and where DeepSpeed is not
    installed.
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
            _fetch_by_layer(deepspeed, model)
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
        self._hooks = _reduce_by_parameter(self._zero) if stage == 3 else []
        self._pending = False  # gradients since the last step
        self._reduced = False
        self._forget()

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        # DeepSpeed would do the first two when its own forward begins and ends, which stages go around.
        self._zero.clear_backward_seen_flag()
        self._engine._backward_prologue()
        # It divides what it adds up by the number of ranks.
        factor = self.world if scale is None else self.world * scale.scale
        self._engine.backward(loss * factor, scale_wrt_gas=False)
        self._pending, self._reduced = True, False

    def reduce(self) -> None:
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
        for group in self.optimizer.param_groups:
            group["lr"] = of_group(lr, group.get("name", ALL))
        with self._gate.opened():
            self._zero.step()
        self._forget()

    def discard(self) -> None:
        if not self._pending:
            return  # DeepSpeed's own step expects a backward pass before it
        if not self._reduced:
            self.reduce()
        self._zero.step()  # through a closed gate
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
        """A hook at a parameter's gradient is out of sight of Python's collector, and so is all that it refers to. The
        stack of running modules is global to DeepSpeed, and the model of every engine of stage 3 stays on it."""
        for hook in self._hooks:
            hook.remove()
        self._engine.destroy()
        running = self._deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK
        running[:] = [module for module in running if module is not self.model]

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def _own_gradients(self) -> dict[str, list[torch.Tensor]]:
        """This rank's, by group of parameters, once they are reduced."""
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self.groups}
        for index, flat in enumerate(self._flats()):
            group = index if self._stage < 3 else self._zero.sub_group_to_group_id[index]
            name = self.optimizer.param_groups[group].get("name", ALL)
            own = [flat.grad] if self._offload else self._zero.averaged_gradients[index]
            found[name] += [tensor for tensor in own if tensor is not None]
        return found

    def _forget(self) -> None:
        """Gradients of stage 3 lie in a buffer that keeps those of a parameter that the next step does not use."""
        if self._stage == 3:
            self._zero.grad_partitions_flat_buffer.zero_()
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
    """The run's optimizer as DeepSpeed sees it: it steps the groups that DeepSpeed asks for, and only while open."""

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


def _fetch_by_layer(deepspeed: Any, model: nn.Module) -> None:
    """Under stage 3 a weight is empty outside of its module. PEFT's DoRA computes norms from weights of several modules
    of a layer, so a decoder layer is fetched as one."""
    layers = {type(layer) for inner in language_models(model) for layer in decoder_layers(inner)}
    if layers:
        deepspeed.utils.set_z3_leaf_modules(model, list(layers))
    for inner in language_models(model):
        inner.get_input_embeddings().register_forward_hook(_with_gradient)


def _reduce_by_parameter(zero: Any) -> list[RemovableHandle]:
    """DeepSpeed reduces what it fetches as one whenever that is done, with whatever gradients are there by then. A
    layer that several parts share, such as an actor and a critic on one trunk, is done once for each of them, and has
    the gradients of all only after the last. So each parameter is reduced when its own gradient is complete, as those
    outside of layers are: in the order of the graph, which is the same on all ranks. Returns the hooks."""
    for hook in zero._leaf_module_hooks:
        hook.remove()
    zero._leaf_module_hooks.clear()
    return [
        parameter.register_post_accumulate_grad_hook(zero.reduce_ready_partitions_and_remove_grads)
        for parameters in zero.leaf_parameters.values()
        for parameter in parameters
        if parameter.requires_grad
    ]


def _with_gradient(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """DeepSpeed takes a layer for done when its input has a gradient: at once, before its weights have theirs, where
    the output of a frozen embedding needs none."""
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output


_BUCKET = 500_000_000  # elements of a message; DeepSpeed's own default
_NEVER = 2**31 - 1


def deepspeed_config(
    *, stage: Literal[1, 2, 3], offload: Literal["none", "optimizer", "all"], world: int, trained: int, pinned: bool
) -> dict[str, Any]:
    """DeepSpeed's settings for a stage of ZeRO.

    stage: of ZeRO.
    offload: to host memory.
    trained: parameters that train.
    pinned: page-locked host memory.

    What the step does itself is off: accumulation, clipping, loss scaling, dtypes. Under ZeRO 3 every weight is shared
    out, however small, and freed as soon as its module has run: stages call the model in other orders than DeepSpeed's
    record of the last step foresees (rollouts, references, evaluations), and what it fetched ahead would be wrong.
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
