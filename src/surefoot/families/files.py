"""Read files of a model folder; errors name the file, line and column."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from surefoot.system import plain_files
from surefoot.system.errors import Fault, InputError

# Files of a tokenizer; a model may have only some of them.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# Files of a multimodal processor; text training copies them unchanged.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises InputError if the file is missing, unreadable or not a JSON object."""
    try:
        value = json.loads(plain_files.read_text(path), object_hook=_as_float)
    except FileNotFoundError:
        raise InputError(
            Fault(str(path), "file does not exist", "a model folder must contain it", code="SF-FILE-MISSING")
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            Fault(f"{path}:{error.lineno}:{error.colno}", f"not JSON: {error.msg}", code="SF-FILE-UNREADABLE")
        ) from None
    except OSError as error:
        raise InputError(
            Fault(str(path), f"cannot be read: {error.strerror or error}", code="SF-FILE-UNREADABLE")
        ) from None
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an integer of thousands of digits
        raise InputError(Fault(str(path), f"cannot be read: {error}", code="SF-FILE-UNREADABLE")) from None
    if not isinstance(value, dict):
        raise InputError(Fault(str(path), f"contains {type(value).__name__}, not an object", code="SF-FILE-UNREADABLE"))
    return value


_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _as_float(value: dict[str, Any]) -> Any:
    """Convert {"__float__": "Infinity"}, transformers' form of infinity (e.g. the limit of Mamba's time steps)."""
    return _FLOATS.get(value.get("__float__", ""), value) if value.keys() == {"__float__"} else value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file, or return an empty one if there is no such file."""
    return read_json(path) if path.is_file() else {}


def read_text(path: Path) -> str:
    """Read a UTF-8 text file. Raises InputError if it is missing or unreadable."""
    try:
        return plain_files.read_text(path)
    except FileNotFoundError:
        raise InputError(
            Fault(str(path), "no such file", "it is relative to the working folder", code="SF-FILE-MISSING")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(Fault(str(path), f"cannot be read: {reason or error}", code="SF-FILE-UNREADABLE")) from None
