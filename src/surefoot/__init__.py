"""Fine-tune language models without losing your footing: no NaNs, no drift, no guesswork.

    from surefoot import load_config, plan, train

Names are imported on first use, so `import surefoot` costs nothing.

accelerate imports DeepSpeed wherever that is installed, and DeepSpeed writes warnings to stdout as it is imported, in
the middle of what a command prints as JSON. Its logger is held to errors here, before anybody can import it.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.config.load import load_config as load_config
    from surefoot.evaluate.answers import Answered as Answered
    from surefoot.models.bos import install_bos_scaling as install_bos_scaling
    from surefoot.objectives.base import LossSum as LossSum
    from surefoot.objectives.sft import supervised_logits as supervised_logits
    from surefoot.stages.api import TrainResult as TrainResult
    from surefoot.stages.api import plan as plan
    from surefoot.stages.api import train as train

    __version__: str

logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)

_PUBLIC = {  # public name -> the module that defines it
    "load_config": "surefoot.config.load",
    "train": "surefoot.stages.api",
    "plan": "surefoot.stages.api",
    "TrainResult": "surefoot.stages.api",
    "LossSum": "surefoot.objectives.base",
    "supervised_logits": "surefoot.objectives.sft",
    "Answered": "surefoot.evaluate.answers",
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
