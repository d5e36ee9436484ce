"""The YAML header of a data set's README, which a stranger wrote: it may name files, and must not take long to read.

An alias is refused, as in a config: a few of them make millions of values.
"""

from __future__ import annotations

from typing import Any

import yaml

from surefoot.system.errors import Fault, InputError

MAX_CHARACTERS = 1 << 20
_LONGEST_NUMBER = 100  # digits; YAML 1.1 multiplies 1:1:1:1… out to base 60
_FENCE = "---"


def read_header(name: str, readme: str) -> Any:
    """The header's value; None where the README has none. name: of the repository. Raises InputError."""
    lines = readme.split("\n")
    if lines[0].rstrip() != _FENCE:
        return None
    end = next((number for number, line in enumerate(lines[1:], 1) if line.rstrip() == _FENCE), None)
    if end is None:
        return None
    text, where = "\n".join(lines[1:end]), f"{name}/README.md"
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            Fault(where, f"its header is longer than {MAX_CHARACTERS:,} characters", _FIX, code="SF-DATA-HUB")
        )
    try:
        return yaml.load(text, _Loader)
    except _Alias as alias:
        raise InputError(
            Fault(where, f"its header has the alias *{alias}, which is not supported", _FIX, code="SF-DATA-HUB")
        ) from None
    except Exception:  # PyYAML's own errors, and whatever its constructors raise on 2024-99-99 or `!!int ''`
        raise InputError(Fault(where, "its header is not YAML", _FIX, code="SF-DATA-HUB")) from None


_FIX = "name the files another way"


class _Alias(Exception):
    """An alias stands here."""


class _Loader(yaml.SafeLoader):
    """Plain values only, without aliases and without numbers that take long."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _Alias(self.peek_event().anchor)
        return super().compose_node(parent, index)

    def whole(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _LONGEST_NUMBER:
            raise ValueError(f"a number of {len(node.value)} characters")
        return self.construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole)
