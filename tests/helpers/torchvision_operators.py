"""torchvision beside a torch for another device, whose kernels do not load: its import then asks for two operators.

Without kernels torchvision's Python resizes pictures as with them.
"""

from importlib.util import find_spec
from pathlib import Path

_BOXES = "Tensor dets, Tensor scores, float iou_threshold"
_declared = []  # torch forgets operators with their library


def declare_operators() -> None:
    """Declare the two operators where torchvision is installed and its kernels do not load."""
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return
    import torch

    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}({_BOXES}) -> Tensor")
        _declared.append(library)
