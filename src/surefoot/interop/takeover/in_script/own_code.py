"""Judge a script's own code around the training: what surefoot does not call, and whether that matters."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

LOSS = "compute_loss"
_WRITES = ("save_model", "_save", "_save_checkpoint")
_REPORTS = ("log", "evaluate", "evaluation_loop", "predict", "prediction_loop", "prediction_step")
_USUAL = (
    "DefaultFlowCallback",
    "ProgressCallback",
    "PrinterCallback",
    "NotebookProgressCallback",
    "RichProgressCallback",
)
_TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "trackio", "wandb")
_ACTS = {"model", "optimizer", "lr_scheduler", "trainer", "train_dataloader", "setattr", "exit", "quit", "_exit"}
"""Names by which a callback reaches what trains, or ends it."""


def overridden(kind: type, known: type) -> list[str]:
    """Return the names of the library's methods that the script's subclasses replace."""
    own = (name for one in kind.__mro__[: kind.__mro__.index(known)] for name in vars(one))
    return sorted({name for name in own if not name.startswith("__") and callable(getattr(known, name, None))})


def harmless_method(name: str) -> str:
    """Return what becomes of a method that does not train, "" for another one."""
    if name in _WRITES:
        return "is called after train() only: checkpoints are surefoot's"
    return "is not called: surefoot logs, and evaluates by the loss" if name in _REPORTS else ""


def harmless_callback(callback: Any) -> str | None:
    """Return what becomes of a callback that changes nothing, "" for the library's progress bars and trackers, None for
    one that acts on the training, or may do so."""
    kind = type(callback)
    if kind.__name__ in _USUAL or kind.__module__.startswith("transformers.integrations"):
        return ""  # the arguments name the trackers
    if kind.__module__.partition(".")[0] in _TRACKERS:
        return "gets nothing: trackers of a run are in report_to"
    return "is not called: it only reports" if _only_reports(kind) else None


def _only_reports(kind: type) -> bool:
    """Whether its methods only read state, logs and what they were built with."""
    bases = kind.__mro__[: next(n for n, one in enumerate(kind.__mro__) if one.__module__.startswith("transformers."))]
    try:
        trees = [ast.parse(textwrap.dedent(inspect.getsource(one))) for one in bases]
    except (OSError, TypeError, SyntaxError):
        return False
    return bool(trees) and not any(_acts(node) for tree in trees for node in ast.walk(tree))


def _acts(node: ast.AST) -> bool:
    match node:
        case ast.Raise():
            return True
        case ast.Attribute(value=ast.Name(id=owner), ctx=ast.Store()) if owner != "self":
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.Constant(value=str(name)):
            return name in _ACTS
    return False
