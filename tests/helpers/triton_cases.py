"""A table of norms, turns and gates, and what Triton's kernels make of it beside the plain formulas in float64.

    TRITON_INTERPRET=1 python triton_cases.py kernels FOLDER       # the table, one line of JSON
    TRITON_INTERPRET=1 python triton_cases.py broken FOLDER        # the same with one line of a kernel changed

Triton reads that variable as it is imported, and keeps to it: so whoever wants to see its interpreter starts a process
of its own (`by_interpreter`). On a GPU `measured` computes the same table in the process of the tests.

`make test` puts Triton into a folder beside the environment and not into it: torch would import it in every run on a
CPU, which takes 70 MiB and gains nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from surefoot.kernels.blocks import NormForm
from surefoot.kernels.forms import Arithmetic, triton_arithmetic
from surefoot.kernels.pointwise import gated, plain_gate, plain_norm, plain_turn, rms_norm, turned_alone
from surefoot.system.libraries import is_installed

TESTS = Path(__file__).parents[1]
BESIDE = TESTS.parent / "build" / "triton"
FORMS = {
    "llama": NormForm(1e-5, 0.0, narrow_first=True),
    "gemma": NormForm(1e-6, 1.0, narrow_first=False),
    "olmo": NormForm(1e-6, 0.0, narrow_first=False),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Rows and numbers of a row: alone, of odd widths, many rows that one program adds up, wider than a tile.
NORMS = ((1, 48), (7, 100), (300, 64), (17, 1000), (3, 5000))
SIZES = (1.0, 1e-3)  # in rows of the second the eps counts
# Heads, numbers of a head, numbers that turn, and whether cos and sin are fp32, as where embeddings are not cast.
TURNS = ((4, 16, 16, False), (3, 80, 80, True), (2, 48, 24, False), (1, 6, 2, True))
GATES = ((5, 40, False), (3, 2500, False), (7, 1300, True))  # rows, numbers, and whether both are halves of one tensor


@dataclass(frozen=True)
class Case:
    """What was found. error, plain: the largest of output and gradients against float64, of ours and of the plain path.
    same: share of the outputs that are the same number as the plain path's. types: whether all types are."""

    error: float
    plain: float
    same: float
    types: bool


def names() -> list[str]:
    """Of all cases, for a test's parameters."""
    return [name for name, _ in _cases()]


def measured(by: Arithmetic, device: str) -> dict[str, Case]:
    return {name: case(by, torch.device(device)) for name, case in _cases()}


def _cases() -> Iterator[tuple[str, Any]]:
    for dtype in DTYPES:
        for form in FORMS:
            for shape in NORMS:
                for size in SIZES:
                    name = f"norm {form} {dtype} {shape[0]}x{shape[1]} about {size:g}"
                    yield name, partial(_norm, FORMS[form], DTYPES[dtype], shape, size)
        yield f"norm llama {dtype} wide weight", partial(_norm, FORMS["llama"], DTYPES[dtype], (7, 100), 1.0, wide=True)
        for turn in TURNS:
            yield f"turn {dtype} {turn[0]}x{turn[1]} {turn[2]} {turn[3]}", partial(_turn, DTYPES[dtype], *turn)
        for gate in GATES:
            yield f"gate {dtype} {gate[0]}x{gate[1]} {gate[2]}", partial(_gate, DTYPES[dtype], *gate)


def _norm(form, dtype, shape, size, by, device, *, wide=False) -> Case:
    """Of rows that lie in a wider tensor, as those of a part of q, k and v do."""
    draws = torch.Generator().manual_seed(0)
    x = (torch.randn(shape[0], shape[1] + 3, generator=draws) * size).to(device, dtype)[:, : shape[1]]
    weight = torch.randn(shape[1], generator=draws).to(
        device, torch.promote_types(dtype, torch.float32) if wide else dtype
    )
    outer = torch.randn(shape, generator=draws)
    plain, ours = partial(plain_norm, form=form), partial(rms_norm, form=form, by=by)
    return _compared(plain, ours, (x.requires_grad_(), weight.requires_grad_()), outer)


def _turn(dtype, heads, head_dim, turned, wide, by, device) -> Case:
    """Tokens before heads in memory, as attention has them, and other numbers in both halves of cos and sin."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, heads, head_dim, generator=draws).to(device, dtype).transpose(1, 2)
    of_tables = torch.promote_types(dtype, torch.float32) if wide else dtype
    cos, sin = (torch.randn(2, 5, turned, generator=draws).to(device, of_tables) for _ in range(2))

    def plain(x, cos, sin):
        return plain_turn(x, cos.unsqueeze(1), sin.unsqueeze(1))

    outer = torch.randn(2, heads, 5, head_dim, generator=draws)
    return _compared(plain, partial(turned_alone, by=by), (x.requires_grad_(), cos, sin), outer)


def _gate(dtype, rows, width, together, by, device) -> Case:
    draws = torch.Generator().manual_seed(0)
    both = torch.randn(2, rows, 2 * width, generator=draws).mul(4).to(device, dtype)
    gate, up = both.chunk(2, dim=-1)
    if not together:
        gate, up = gate.contiguous(), up.contiguous()
    outer = torch.randn(2, rows, width, generator=draws)
    return _compared(plain_gate, partial(gated, by=by.gates), (gate.requires_grad_(), up.requires_grad_()), outer)


def _compared(plain, ours, given, outer) -> Case:
    exact = _passed(plain, [one.detach().double().requires_grad_(one.requires_grad) for one in given], outer)
    one, other = (_passed(way, given, outer) for way in (ours, plain))
    return Case(
        _largest(one, exact),
        _largest(other, exact),
        float((one[0] == other[0]).double().mean()),
        [tensor.dtype for tensor in one] == [tensor.dtype for tensor in other],
    )


def _passed(way, given, outer) -> list[torch.Tensor]:
    output = way(*given)
    learning = [one for one in given if one.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, learning, outer.to(output.device, output.dtype))]


def _largest(found, wanted) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((one.double() - other).norm() / other.norm()) for one, other in pairs)


# Name -> the line of the kernels that is changed, what it becomes, and a case in which that has to show.
BROKEN = {
    "eps outside of the root": (
        "tl.rsqrt(tl.sum(block * block, axis=1) / WIDTH + EPS)",
        "tl.rsqrt(tl.sum(block * block, axis=1) / WIDTH) + EPS",
        "norm llama fp32 7x100 about 0.001",
    ),
    "no mask beyond the row": (
        "block = tl.load(x + row[:, None] * stride + column[None, :], mask=there,",
        "block = tl.load(x + row[:, None] * stride + column[None, :], mask=(row < rows - 1)[:, None],",
        "norm llama fp32 7x100 about 1",
    ),
    "no inner product": (
        "(gradient - normed * inner[:, None])",
        "(gradient - normed * 0)",
        "norm gemma fp32 7x100 about 1",
    ),
    "only the first of its tiles": (
        "(program * steps + step) * TALL",
        "(program * steps + 0 * step) * TALL",
        "norm gemma fp32 300x64 about 1",
    ),
    "no rounding before the weight": (
        "block.to(x.dtype.element_ty).to(TYPE) * factor",
        "block * factor",
        "norm llama fp16 17x1000 about 1",
    ),
    "a backward pass that turns the same way": (
        "a_sin, b_sin = b_sin, a_sin",
        "a_sin, b_sin = a_sin, b_sin",
        "turn fp32 3x80 80 True",
    ),
    "what does not turn is lost": ("if REST > 0:", "if REST > 1000:", "turn fp32 2x48 24 False"),
    "a gate's slope without its second part": (
        "(1.0 + g * (1.0 - s))",
        "(1.0 - 0 * g)",
        "gate fp32 5x40 False",
    ),
    "one stride for both halves": (
        "up + row[:, None] * up_stride",
        "up + row[:, None] * WIDTH",
        "gate fp32 7x1300 True",
    ),
}


def broken(folder: Path) -> dict[str, Case]:
    """The case of each of `BROKEN`, by its name."""
    import surefoot.kernels.triton_pointwise as right

    source, cases, found = Path(right.__file__).read_text(encoding="utf-8"), dict(_cases()), {}
    for number, (name, (line, other, case)) in enumerate(BROKEN.items()):
        assert line in source, name
        path = folder / f"broken_{number}.py"
        path.write_text(source.replace(line, other), encoding="utf-8")
        found[name] = cases[case](arithmetic_of(path), torch.device("cpu"))
    return found


def arithmetic_of(path: Path) -> Arithmetic:
    """As `triton_arithmetic`, from a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    module._PARTS = 2
    kernels = triton_arithmetic()
    assert kernels.gates is not None
    parts = {name: getattr(module, name) for name in ("norm_forward", "norm_backward", "turn", "turn_back")}
    gates = replace(kernels.gates, forward=module.gate_forward, backward=module.gate_backward)
    return replace(kernels, **parts, gates=gates)


def has_triton() -> bool:
    """Installed, or in its folder beside the environment."""
    return is_installed("triton") or (BESIDE / "triton").is_dir()


def by_interpreter(asked: str, folder: Path, program: Path = Path(__file__)) -> dict[str, Any]:
    """What a process of its own prints."""
    return said_with_triton([str(program), asked, str(folder)], TRITON_INTERPRET="1")


def said_with_triton(words: Sequence[str], **variables: str) -> dict[str, Any]:
    """The last line that Python prints with these words and environment variables, as JSON."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS), str(BESIDE)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    asked, folder = sys.argv[1:]
    if asked == "broken":
        found: Mapping[str, Case] = broken(Path(folder))
    else:
        import surefoot.kernels.triton_pointwise as kernels

        kernels._PARTS = 2  # few rows are enough for one program to add up several tiles
        found = measured(triton_arithmetic(), "cpu")
    print(json.dumps({name: asdict(case) for name, case in found.items()}))


if __name__ == "__main__":
    main()
