"""Read what a script sets in torch and its process: attention kernels, matmul precision, environment variables.

    torch.backends.cuda.enable_flash_sdp(False)              # attention.flash: off
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION): …      # around train(): all other kernels off
    torch.set_float32_matmul_precision("high")               # precision.tf32: on
    os.environ["WANDB_PROJECT"] = "demo"                     # set for the run

Names are followed through imports and assignments. Any other setting in torch.backends is noted.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.interop.launch import environment_note
from surefoot.interop.script.literals import Findings, Script
from surefoot.interop.translation import Outcome
from surefoot.interop.words import Word

KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_ENABLE = {f"enable_{kernel}_sdp": kernel for kernel in KERNELS}
_OLD_CONTEXT = {"enable_flash": "flash", "enable_math": "math", "enable_mem_efficient": "mem_efficient",
                "enable_cudnn": "cudnn"}  # fmt: skip
_BACKENDS = {"FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "mem_efficient", "MATH": "math",
             "CUDNN_ATTENTION": "cudnn"}  # fmt: skip
_PRODUCTS = {"highest": False, "high": True, "medium": True, "tf32": True, "ieee": False, "none": False}
_PLANNED = "is decided at run time in the script; here surefoot's plan decides it"
_ELSEWHERE = "applies to code that is not read; the plan chooses the kernels"
_UNREAD = "is not read: surefoot keeps torch's default"
_MEDIUM = "medium allows bf16 products in torch, and TF32 here"
_NO_CONVOLUTIONS = "applies to convolutions, which language models do not have"


@dataclass(frozen=True)
class Machine:
    """environment: variables that the script sets; defaults: variables it sets only if they are unset."""

    found: Findings
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Script:
        return self.found.script

    def note(self, node: ast.AST, why: str, outcome: Outcome = "changed") -> None:
        self.found.note(node, self.script.text(node), why, outcome)


def read_machine(found: Findings, trains: ast.expr | None) -> Machine:
    """Read the settings of torch and the process. trains: the object whose train() is the run."""
    machine = Machine(found)
    nodes = [node for node in ast.walk(found.script.tree) if isinstance(node, ast.stmt | ast.expr)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):  # later settings override earlier ones
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                _stored(machine, node, target)
        elif isinstance(node, ast.With):
            _context(machine, node, trains)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and found.script.dotted(target.value) == "os.environ":
                    machine.note(node, "surefoot does not unset environment variables")
        elif isinstance(node, ast.Call):
            _called(machine, node)
    return machine


def _stored(machine: Machine, node: Any, target: ast.expr) -> None:
    name = machine.script.dotted(target) if isinstance(target, ast.Attribute) else ""
    if isinstance(target, ast.Subscript) and machine.script.dotted(target.value) == "os.environ":
        _variable(machine, node, target.slice, node.value)
    elif name == "os.environ":
        _variables(machine, node, node.value)
    elif name.startswith("torch.backends.cudnn."):
        machine.note(node, _NO_CONVOLUTIONS, "listed")
    elif name == "torch.backends.cuda.matmul.allow_tf32":
        _tf32(machine, node, machine.script.value(node.value))
    elif name in ("torch.backends.cuda.matmul.fp32_precision", "torch.backends.fp32_precision"):
        _tf32(machine, node, _PRODUCTS.get(str(machine.script.value(node.value))))
    elif name.startswith("torch.backends."):
        machine.note(node, _UNREAD)


def _called(machine: Machine, node: ast.Call) -> None:
    name = machine.script.dotted(node.func)
    last = name.rpartition(".")[2]
    given = node.args[0] if node.args else next((word.value for word in node.keywords), None)
    held = None if given is None else machine.script.value(given)
    if last in _ENABLE:
        if isinstance(held, bool):
            _kernel(machine, node, _ENABLE[last], held)
        else:
            machine.note(node, _PLANNED)
    elif name == "torch.set_float32_matmul_precision":
        _tf32(machine, node, _PRODUCTS.get(str(held)))
        if held == "medium":
            machine.note(node, _MEDIUM)
    elif name in ("os.environ.setdefault", "os.putenv") and len(node.args) == 2:
        _variable(machine, node, node.args[0], node.args[1], default=name.endswith("setdefault"))
    elif name == "os.environ.update":
        for value in node.args:
            _variables(machine, node, value)
        for word in node.keywords:
            _variable(machine, node, ast.Constant(word.arg), word.value)
    elif name in ("os.environ.pop", "os.environ.clear", "os.unsetenv"):
        machine.note(node, "surefoot does not unset environment variables")
    elif name.startswith("torch.backends.") and not last.endswith(
        ("sdp_kernel", "_enabled", "is_available", "version")
    ):
        machine.note(node, _UNREAD)


def _context(machine: Machine, node: ast.With, trains: ast.expr | None) -> None:
    for item in node.items:
        call = machine.script.bound(item.context_expr)
        last = machine.script.dotted(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or last not in ("sdpa_kernel", "sdp_kernel"):
            continue
        allowed = _listed(machine.script, call) if last == "sdpa_kernel" else _by_switches(machine.script, call)
        if not any(_is_training(machine.script, one, trains) for one in ast.walk(node)):
            machine.note(item.context_expr, _ELSEWHERE)
        elif allowed is None:
            machine.note(item.context_expr, _PLANNED)
        else:
            for kernel in KERNELS:
                alone = "on" if allowed == {"cudnn"} else True  # cuDNN's kernel is used only on request
                _kernel(machine, item.context_expr, kernel, alone if kernel in allowed else False)


def _listed(script: Script, call: ast.Call) -> set[str] | None:
    """Return the kernels that `sdpa_kernel(…)` allows; None if that is not a literal."""
    given = call.args[0] if call.args else next((word.value for word in call.keywords if word.arg == "backends"), None)
    if given is None:
        return None
    given = script.bound(given)
    items = given.elts if isinstance(given, ast.List | ast.Tuple) else [given]
    names = [_BACKENDS.get(script.dotted(item).rpartition(".")[2]) for item in items]
    return None if None in names else {name for name in names if name}


def _by_switches(script: Script, call: ast.Call) -> set[str] | None:
    """Return the kernels that the older `torch.backends.cuda.sdp_kernel(enable_flash=…)` allows."""
    requested = dict.fromkeys(_OLD_CONTEXT.values(), True)
    for name, value in [*zip(_OLD_CONTEXT, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)]:
        held = script.value(value)
        if name not in _OLD_CONTEXT or not isinstance(held, bool):
            return None
        requested[_OLD_CONTEXT[name]] = held
    return {name for name, on in requested.items() if on}


def _is_training(script: Script, node: ast.AST, trains: ast.expr | None) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=holder, attr="train")):
            return trains is not None and script.bound(holder) is trains
    return False


def _kernel(machine: Machine, node: ast.AST, kernel: str, value: bool | str) -> None:
    machine.found.words.append(
        Word(f"enable_{kernel}_sdp", value, machine.script.where(node), machine.script.text(node))
    )


def _tf32(machine: Machine, node: ast.AST, value: Any) -> None:
    if isinstance(value, bool):
        machine.found.words.append(Word("tf32", value, machine.script.where(node), machine.script.text(node)))
    else:
        machine.note(node, _PLANNED)


def _variables(machine: Machine, node: ast.AST, value: ast.expr) -> None:
    value = machine.script.bound(value)
    if not isinstance(value, ast.Dict):
        machine.note(node, "is not a literal, so it is not set for the run")
        return
    for name, one in zip(value.keys, value.values, strict=True):
        _variable(machine, node, name or ast.Constant(None), one)


def _variable(machine: Machine, node: ast.AST, name: ast.expr, value: ast.expr, *, default: bool = False) -> None:
    variable, text = machine.script.value(name), machine.script.value(value)
    if not isinstance(variable, str) or not isinstance(text, str):
        machine.note(node, "is not a literal, so it is not set for the run")
        return
    (machine.defaults if default else machine.environment)[variable] = text
    machine.found.notes.append(replace(environment_note(variable, text), where=machine.script.where(node)))
