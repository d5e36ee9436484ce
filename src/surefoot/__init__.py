"""Fine-tune language models without losing your footing: no NaNs, no drift, no guesswork.

    from surefoot import load_config

Names are imported on first use, so `import surefoot` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.config.load import load_config as load_config

    __version__: str

_PUBLIC = {"load_config": "surefoot.config.load"}  # public name -> the module that defines it


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("surefoot")
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *_PUBLIC]
