"""User functions that a config names: a loss, a record reader, metrics, a reward.

    functions: {loss: focal.py:focal, record: quiz.py:quiz, metrics: [own.py:shared_words]}
    ppo: {reward: my_package.rewards:score}
    alignment: {loss: entry_point:wide}

FILE.py:FUNCTION is relative to the working folder; MODULE:FUNCTION is in an installed package; entry_point:NAME is the
function that an installed package registers as NAME in the group "surefoot.functions". This code runs in the process
with all its rights, because the user names it; nothing else in a config is ever executed, and no package is imported
merely because it is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sized
from importlib import metadata
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from surefoot.system import durable
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.locations import is_function
from surefoot.system.messages import nearest_word

_ENTRY_POINT = "entry_point"  # prefix of an entry point's name
_GROUP = "surefoot.functions"


def passed_name(function: Callable[..., Any]) -> str:
    """The name of a function, or of a callable object's class, that a Python caller passes; its code cannot be
    compared."""
    kind = type(function)
    name = getattr(function, "__qualname__", kind.__qualname__)
    return f"{getattr(function, '__module__', kind.__module__)}.{name}"


def name_of(text: str) -> str:
    """Return the function's name without its file or module."""
    return text.rpartition(":")[2]


def own_function(text: str, key: str) -> Callable[..., Any]:
    """Import the function that the config names.

    text: FILE.py:FUNCTION, MODULE:FUNCTION or entry_point:NAME.
    key: config key, for faults.

    Raises InputError if there is no such function, or its module cannot be imported.
    """
    where, _, name = text.rpartition(":")
    if where == _ENTRY_POINT:
        return own_function(_registered(name, key), key)
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
            if isinstance(value, FunctionType | type) and value.__module__ == module.__name__ and one[0] != "_"
        ]
        near = nearest_word(name, own)
        has = f"it has {', '.join(own)}" if own else "it has no function"
        what = f"{where} has no function {name!r}" if found is None else f"{name!r} in {where} is not a function"
        raise InputError(Fault(key, what, f"did you mean {near}?" if near else has, code="SF-OWN-FUNCTION"))
    return found


def of_each_pair(
    loss: Callable[..., Any], name: str, key: str, *, when_it_raises: str = ""
) -> Callable[..., torch.Tensor]:
    """Wrap a user's pair loss so that its errors become one line.

    loss: called with P pairs first; returns [P].
    name: its name in the config.
    key: config key.
    when_it_raises: fix to suggest if it raises.

    Raises InputError if it raises, or does not return [P].
    """

    def checked(pairs: Sized, *others: Any) -> torch.Tensor:
        try:
            found = loss(pairs, *others)
        except Exception as error:
            what = f"the loss raised {one_line(error)}"
            raise InputError(Fault(place_in(error, name), what, when_it_raises, code="SF-OWN-FUNCTION")) from error
        if not isinstance(found, torch.Tensor) or found.shape != (len(pairs),):
            got = f"a tensor of {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            what = f"{name} returned {got} for {len(pairs)} pairs"
            fix = "return the loss of each pair, a tensor [pairs], not their sum or mean"
            raise InputError(Fault(key, what, fix, code="SF-OWN-FUNCTION"))
        return found

    return checked


def _entry_points(name: str) -> list[metadata.EntryPoint]:
    return list(metadata.entry_points(group=_GROUP, name=name))


def _registered(name: str, key: str) -> str:
    """Return MODULE:FUNCTION of the package that registers the name. Raises InputError for none, several or a bad
    value."""
    found = _entry_points(name)
    if not found:
        known = sorted({one.name for one in metadata.entry_points(group=_GROUP)})
        near = nearest_word(name, known)
        there = f"there are {', '.join(known)}" if known else "nothing is registered"
        what = f"no installed package registers {name!r} in {_GROUP}"
        raise InputError(Fault(key, what, f"did you mean {near}?" if near else there, code="SF-OWN-FUNCTION"))
    value = found[0].value
    if len(found) > 1:
        what = f"{' and '.join(_package(one) for one in found)} both register {name!r}"
        raise InputError(Fault(key, what, "uninstall one, or name MODULE:FUNCTION", code="SF-OWN-FUNCTION"))
    if not is_function(value) or value.partition(":")[0] == _ENTRY_POINT:
        what = f"{_package(found[0])} registers {value!r} as {name!r}, which is not MODULE:FUNCTION"
        raise InputError(Fault(key, what, "correct its entry point", code="SF-OWN-FUNCTION"))
    return value


def _package(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed package"


def identity(text: str) -> str:
    """Return what identifies the function on resume: its name, for an entry point its package with version, and the
    SHA-256 of the file that defines it."""
    where, _, name = text.rpartition(":")
    if where == _ENTRY_POINT:
        found = _entry_points(name)
        return f"{name} {_package(found[0])} {identity(found[0].value).rpartition(' ')[2]}" if found else text
    file = Path(where) if where.endswith(".py") else _source(where)
    return f"{name} {durable.sha256_file(file)}" if file is not None and file.is_file() else text


def _source(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # the parent package is missing
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
            Fault(key, f"{module} cannot be imported: {one_line(error)}", fix, code="SF-OWN-FUNCTION")
        ) from error


@functools.lru_cache(maxsize=8)  # loading may be expensive: once per content
def _file_module(file: Path, content: str) -> ModuleType:
    """Import a file as a module, with its folder in sys.path, as if it were run."""
    name = f"surefoot_own_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    folder = os.fspath(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        what = f"cannot be imported: {one_line(error)}"
        raise InputError(Fault(place_in(error, str(file)), what, code="SF-OWN-FUNCTION")) from error
    return module


def place_in(error: BaseException, name: str) -> str:
    """Return FILE:LINE of the user's code where the error was raised: the last frame outside libraries.

    error: the caught exception.
    name: the file, FILE.py:FUNCTION, or another name of the function.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    file = name.rpartition(":")[0] if is_function(name) else name
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(Path(file).name)]
    return f"{file}:{frames[-1].lineno}" if frames else name


def one_line(error: BaseException) -> str:
    """Format the error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:240]
