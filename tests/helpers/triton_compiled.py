"""Compile each of Triton's kernels for a GPU that need not be there, as a run of an 8B model in bf16 would have them.

python triton_compiled.py 90        # compute capability 9.0: prints bytes of machine code by kernel, as JSON
"""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from surefoot.kernels import triton_pointwise as kernels

ROWS = {"WIDTH": 4096, "TALL": 1, "WIDE": 4096, "TYPE": tl.float32}
HEADS = {"HALF": 40, "REST": 8, "REST_WIDE": 8, "TALL": 16, "WIDE": 64, "TYPE": tl.float32}
GATE = {"WIDTH": 14_336, "TALL": 1, "WIDE": 1024, "TYPE": tl.float32}
SUMS = {"scales": "*fp32", "sums": "*fp32"}
CASES = {
    "norm forward": (kernels._norm_forward, {"EPS": 1e-5, "SHIFT": 0.0, "NARROW_FIRST": True, **ROWS}),
    "norm backward": (kernels._norm_backward, {"SHIFT": 1.0, "TRAINS": False, **ROWS}),
    "norm backward, weight trains": (kernels._norm_backward, {"SHIFT": 0.0, "TRAINS": True, **ROWS, "WIDTH": 3000}),
    "turn": (kernels._turn, {"BACK": False, **HEADS}),
    "turn back": (kernels._turn, {"BACK": True, **HEADS, "REST": 0}),
    "gate forward": (kernels._gate_forward, GATE),
    "gate backward": (kernels._gate_backward, GATE),
}
TENSORS = ("x", "y", "dx", "dy", "weight", "cos", "sin", "gate", "up", "dgate", "dup")


def main() -> None:
    found = {}
    for name, (kernel, constants) in CASES.items():
        given = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(TENSORS, "*bf16") | SUMS
        types = {one: given[one] for one in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 8})
        found[name] = len(made.asm["cubin"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
