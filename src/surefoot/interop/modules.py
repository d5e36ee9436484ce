"""Names of modules, as the tools write them: which ones an adapter changes, and PEFT's choice where nobody says.

    module_names("q_proj v_proj")                    # ["q_proj", "v_proj"]; commas and literals of lists as well

PEFT takes a text for a regular expression. surefoot's targets are names alone, so a pattern is no name.
"""

from __future__ import annotations

import re
from typing import Any

from surefoot.interop.draft import Draft

_NAME = re.compile(r"[\w.-]+")
_LIST = re.compile(r"\[(.*)\]|\((.*)\)", re.DOTALL)
_EXPECTED = "names of modules, such as [q_proj, v_proj], and no pattern"
_BECAUSE = "PEFT's default for Llama, Mistral and Qwen2; name them for a family whose modules are called otherwise"


def module_names(value: Any) -> list[str] | None:
    """Names with blanks or commas between them, a literal of a list, and what a shell makes of one; None for none.

    Raises ValueError, which says what was expected, for a pattern.
    """
    if value is None or value in ("None", ""):
        return None
    items = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, bool | int | float | dict) for item in items):
        raise ValueError(_EXPECTED)
    text = " ".join(str(item) for item in items).strip()
    written = _LIST.fullmatch(text)
    inner = text if written is None else next(group for group in written.groups() if group is not None)
    names = [name.strip("'\"") for name in re.split(r"[\s,]+", inner) if name.strip("'\"")]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ValueError(_EXPECTED)
    return names or None


def set_default_targets(draft: Draft, name: str) -> None:
    """PEFT's choice where nobody names modules in the setting `name`; ours, all linear layers, would be another
    adapter."""
    draft.drop("PEFT's default for the family", name)
    draft.set("adapter.targets", ["q_proj", "v_proj"], *([] if draft.given(name) else [name]), why=_BECAUSE)
