"""Count the FLOPs of matrix products by dtype and module, at torch's dispatcher, after autocast.

    with ProductFlops() as seen:
        loss(model, batch).backward()
    seen.share("fp32")
    seen.modules("fp32")

Autocast affects only torch's own functions. Code outside of it (custom functions, disabled regions, modules that
upcast) multiplies in fp32 inside a run that is supposed to be in 16 bits, which is many times slower on most devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from surefoot.kernels.packed_attention import logits_are_wider

_ATEN = torch.ops.aten
# torch's registry lacks in-place products and the CPU's flash attention.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    _ATEN.baddbmm_: flop_registry[_ATEN.baddbmm],
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_LOGITS = "logits of documents"  # instead of a dtype


class ProductFlops(TorchDispatchMode):
    """Context that counts FLOPs of matrix products and attention, forward and backward. Attention logits of packed
    documents, which are in fp32 on purpose, count in `total` but for no dtype."""

    def __init__(self) -> None:
        super().__init__()
        self._tracker = ModuleTracker()
        self._counted: Counter[tuple[str, str]] = Counter()  # (type, module) -> FLOPs

    def __enter__(self) -> ProductFlops:
        self._tracker.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._tracker.__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func.overloadpacket)
        tensors = [one for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()]
        if formula is not None and tensors:
            dtype = _LOGITS if logits_are_wider() else _NAMES.get(tensors[0].dtype, str(tensors[0].dtype))
            self._counted[dtype, self._module()] += formula(*args, **(kwargs or {}), out_val=out)
        return out

    def _module(self) -> str:
        """Return the innermost running module. The tracker's names start with the class of the outermost one."""
        inner = max(self._tracker.parents, key=lambda name: (name.count("."), len(name), name))
        return inner.partition(".")[2] or inner

    @property
    def total(self) -> int:
        """FLOPs of all dtypes."""
        return self._counted.total()

    def share(self, dtype: str) -> float:
        """Return the fraction of FLOPs in a dtype (fp32, bf16, fp16, fp64); 0 if nothing was counted."""
        own = sum(count for (kind, _), count in self._counted.items() if kind == dtype)
        return own / self._counted.total() if self._counted else 0.0

    def modules(self, dtype: str) -> list[tuple[str, float]]:
        """Return (module, fraction of all FLOPs) for the FLOPs in a dtype, largest first."""
        total = self._counted.total()
        own = {name: count / total for (kind, name), count in self._counted.items() if kind == dtype and count}
        return sorted(own.items(), key=lambda item: (-item[1], item[0]))
