"""Durations carry their unit: "200 steps", "3 epochs", "1e6 tokens"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

Unit = Literal["steps", "epochs", "tokens"]
# The look-ahead asks for one digit that is not 0, so that editors refuse "0 steps" as well.
_PATTERN = re.compile(
    r"^\s*((?=[0-9_.]*[1-9])[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(steps?|epochs?|tokens?)\s*$"
)


@dataclass(frozen=True)
class Duration:
    """A length of training. Steps and tokens are whole; epochs may be fractional ("0.5 epochs")."""

    count: float
    unit: Unit

    @classmethod
    def parse(cls, text: object) -> Duration:
        if isinstance(text, Duration):
            return text
        match = _PATTERN.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"{text!r} is not a duration; write a number and a unit, like 200 steps, 3 epochs, 1e6 tokens"
            )
        count = float(match[1].replace("_", ""))
        unit: Any = match[2].rstrip("s") + "s"
        if not (0 < count < math.inf):
            raise ValueError(f"{text!r} must be longer than zero and finite")
        if unit != "epochs" and count != int(count):
            raise ValueError(f"{text!r}: {unit} must be a whole number")
        return cls(count, unit)

    def __str__(self) -> str:
        count = int(self.count) if self.count == int(self.count) else self.count
        return f"{count} {self.unit[:-1] if count == 1 else self.unit}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=core_schema.to_string_ser_schema())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": _PATTERN.pattern, "examples": ["200 steps", "3 epochs", "1e6 tokens"]}
