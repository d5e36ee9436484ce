"""Read values of config.json with checks, collecting every fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from surefoot.families.family import Key
from surefoot.system.errors import Fault

Stored = Literal["fp32", "bf16", "fp16"]
_STORED: dict[str, Stored] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class ConfigKeys:
    """Values of config.json, checked when they are read.

    values: the file's values; `defaults` fills in missing keys.
    names: key -> the file's name for it, if different.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, *, names: Mapping[str, str] = {}, defaults: Mapping[str, Any] = {}
    ):
        self.values, self.where, self._names = {**defaults, **values}, where, names
        self.faults: list[Fault] = []

    def fault(self, key: str, what: str, fix: str = "this is not the config.json of a supported model") -> None:
        self.faults.append(Fault(self.where, f"{self.name(key)}: {what}", fix, code="SF-MODEL-KIND"))

    def name(self, key: str) -> str:
        return self._names.get(key, key)

    def get(self, key: str) -> Any:
        return self.values.get(self.name(key))

    def says(self, key: Key) -> bool:
        return bool(self.values.get(key.name)) == key.on

    def positive(self, key: str, default: int | None = None, most: int | None = None) -> int:
        """Read a positive integer, at most `most`; `default` if it is missing or null."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if most is None or value <= most:
                return value
            self.fault(key, f"{value} is above the maximum of {most:,}")
            return 1
        self.fault(key, "is missing" if value is None else f"{value!r} is not a positive whole number")
        return 1

    def share(self, key: str) -> float:
        value = self.get(key)
        value = 0.0 if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
            return float(value)
        self.fault(key, f"{value!r} is not a number from 0 to 1")
        return 0.0

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.fault(key, f"{value!r} is neither true nor false")
        return bool(value)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            self.fault(key, "is missing" if value is None else f"{value!r} is not text")
        return str(value)

    def stored(self) -> Stored:
        """Read `dtype`, called torch_dtype before transformers 5; fp32 if both are missing."""
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in _STORED:
            self.fault("dtype", f"{name!r} is not one of {', '.join(_STORED)}")
            return "fp32"
        return _STORED[name]
