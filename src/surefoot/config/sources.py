"""Where each key of a run's config came from: a line of the file, or an override on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from surefoot.config.yaml_reader import Document, place


@dataclass
class Sources:
    """Positions of the file, overlaid with the overrides in the order in which they were given."""

    document: Document
    overrides: dict[str, str] = field(default_factory=dict)  # dotted key -> the override as it was typed

    def override(self, key: str, text: str) -> None:
        """From now on `key`, and whatever it holds, comes from the override `text`."""
        self.overrides = {known: typed for known, typed in self.overrides.items() if not known.startswith(f"{key}.")}
        self.overrides[key] = text

    def of_key(self, key: str) -> str:
        """Where a message about the key itself points: "run.yaml:3:1", or the override."""
        return self._where(key, self.document.keys)

    def of_value(self, key: str) -> str:
        return self._where(key, self.document.values)

    def of_group(self, key: str) -> str:
        """Where a message about an absent key points: at the group it belongs to; the file for a top-level key."""
        group = key.rpartition(".")[0]
        if group.rpartition(".")[2].isdecimal():  # an item of a list has no key of its own
            return self.of_value(group)
        return self.of_key(group) if group else self.document.path

    def origin(self, key: str) -> str:
        """ "override" or "file:line", of a key that was given."""
        if self._override(key) is not None:
            return "override"
        for name in _upwards(key):
            if name in self.document.keys:
                return f"{self.document.path}:{self.document.keys[name].line}"
        raise KeyError(key)

    def _where(self, key: str, positions: dict[str, Any]) -> str:
        typed = self._override(key)
        if typed is not None:
            return f"override {typed}"
        for name in _upwards(key):
            if name in positions:
                return place(self.document.path, positions[name])
        return self.document.path

    def _override(self, key: str) -> str | None:
        """The one that `key` comes from, which may have replaced a group that the file spells out."""
        return next((self.overrides[name] for name in _upwards(key) if name in self.overrides), None)


def _upwards(key: str) -> Iterator[str]:
    """ "a.b.c", "a.b", "a" """
    while key:
        yield key
        key = key.rpartition(".")[0]
