"""Fine-tune language models without losing your footing: no NaNs, no drift, no guesswork.

    from surefoot import load_config, plan, train

Names are imported on first use, so `import surefoot` costs nothing.

accelerate imports DeepSpeed wherever that is installed, and DeepSpeed writes warnings to stdout as it is imported, in
the middle of what a command prints as JSON. Its logger is held to errors here, before anybody can import it.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from surefoot.system import errors

if TYPE_CHECKING:
    from surefoot.config.load import load_config as load_config
    from surefoot.methods.losses.sft import supervised_logits as supervised_logits
    from surefoot.models.bos import install_bos_scaling as install_bos_scaling
    from surefoot.runs.api import TrainResult as TrainResult
    from surefoot.runs.api import plan as plan
    from surefoot.runs.api import train as train
    from surefoot.training.evaluation import Answered as Answered
    from surefoot.training.objective import LossSum as LossSum

    __version__: str

# Its public name, as docs/python.md has it: `from surefoot.errors import InputError`.
sys.modules[f"{__name__}.errors"] = errors

# What they log while they are imported, torchao by transformers wherever it is installed, is of no use to a run.
for _name in ("DeepSpeed", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).addFilter(lambda record: record.levelno >= logging.ERROR)

_PUBLIC = {  # public name -> the module that defines it
    "load_config": "surefoot.config.load",
    "train": "surefoot.runs.api",
    "plan": "surefoot.runs.api",
    "TrainResult": "surefoot.runs.api",
    "LossSum": "surefoot.training.objective",
    "supervised_logits": "surefoot.methods.losses.sft",
    "Answered": "surefoot.training.evaluation",
    "install_bos_scaling": "surefoot.models.bos",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("surefoot")
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *_PUBLIC]
