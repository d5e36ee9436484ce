"""Functions of the user's own that a config names: a loss, a record reader, metrics, a reward.

    functions: {loss: focal.py:focal, record: quiz.py:quiz, metrics: [own.py:shared_words]}
    ppo: {reward: my_package.rewards:score}

FILE.py:FUNCTION is relative to the working folder; MODULE:FUNCTION is of an installed package. Either is code that the
user names and this process runs, with all its rights; nothing else is ever executed because a config names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from surefoot.system import durable
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.locations import is_function
from surefoot.system.messages import nearest_word


def name_of(text: str) -> str:
    """The function's own name."""
    return text.rpartition(":")[2]


def own_function(text: str, key: str) -> Callable[..., Any]:
    """The function that the config names.

    text: FILE.py:FUNCTION or MODULE:FUNCTION.
    key: of the config, for faults.

    Raises InputError where there is no such function, or its module cannot be imported.
    """
    where, _, name = text.rpartition(":")
    if not is_function(text):
        raise InputError(Fault(key, f"{text!r} is not FILE.py:FUNCTION or MODULE:FUNCTION", code="SF-OWN-FUNCTION"))
    file = Path(where)
    if file.suffix == ".py" and not file.is_file():
        fix = "it is relative to the working folder"
        raise InputError(Fault(key, f"there is no file {file}", fix, code="SF-FILE-MISSING"))
    module = _file_module(file, identity(text)) if file.suffix == ".py" else _installed(where, key)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            one
            for one, value in vars(module).items()
            if isinstance(value, FunctionType) and value.__module__ == module.__name__ and one[0] != "_"
        ]
        near = nearest_word(name, own)
        has = f"it has {', '.join(own)}" if own else "it has no function"
        what = f"{where} has no function {name!r}" if found is None else f"{name!r} in {where} is no function"
        raise InputError(Fault(key, what, f"did you mean {near}?" if near else has, code="SF-OWN-FUNCTION"))
    return found


def identity(text: str) -> str:
    """By which a resumed run knows the function again: its name, and the SHA-256 of the file that defines it."""
    where, _, name = text.rpartition(":")
    file = Path(where) if where.endswith(".py") else _source(where)
    return f"{name} {durable.sha256_file(file)}" if file is not None and file.is_file() else text


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a parent that is not there
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


def _installed(module: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except SurefootError:
        raise
    except Exception as error:
        fix = "install the package, or name a file: FILE.py:FUNCTION"
        raise InputError(
            Fault(key, f"{module} cannot be imported: {said(error)}", fix, code="SF-OWN-FUNCTION")
        ) from error


@functools.lru_cache(maxsize=8)  # a file of the user's may load what it likes: once for each content
def _file_module(file: Path, content: str) -> ModuleType:
    """The file as a module of its own, with its folder to import from, as when it is run."""
    name = f"surefoot_own_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for their module
    folder = os.fspath(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        what = f"cannot be imported: {said(error)}"
        raise InputError(Fault(place_in(error, str(file)), what, code="SF-OWN-FUNCTION")) from error
    return module


def place_in(error: BaseException, name: str) -> str:
    """FILE:LINE of the user's code that the error came from or through: the last line that is not a library's.

    error: as it was caught.
    name: the file, FILE.py:FUNCTION, or what else the user calls the function.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    file = name.rpartition(":")[0] if is_function(name) else name
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(Path(file).name)]
    return f"{file}:{frames[-1].lineno}" if frames else name


def said(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:240]
