"""Types for the schema: strict numbers, switches, durations with a unit, sections, short forms."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema


def _number(value: Any) -> Any:
    """Reject "16" and true, which pydantic accepts as numbers but the JSON Schema does not."""
    if isinstance(value, bool | str):
        raise ValueError("not a number")
    return value


def _on_off(value: Any) -> Any:
    """Convert `true`/`false` to `on`/`off`, which are strings in YAML 1.2."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Number = BeforeValidator(_number)  # last, so that the bounds apply to the number itself and appear in the JSON Schema
Count = Annotated[int, Field(ge=1), Number]
Positive = Annotated[float, Field(gt=0), Number]
NonNegative = Annotated[float, Field(ge=0), Number]
Share = Annotated[float, Field(ge=0, lt=1), Number]
Text = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Strict()]
_FUNCTION = r"^[^:\x00-\x1f]+:[A-Za-z_][A-Za-z_0-9]*$"  # FILE.py:FUNCTION or MODULE:FUNCTION
OwnFunction = Annotated[str, Field(pattern=_FUNCTION, title="a function such as own.py:my_loss")]
Switch = Annotated[
    Literal["auto", "on", "off"], BeforeValidator(_on_off), WithJsonSchema({"enum": ["auto", "on", "off", True, False]})
]
CompileMode = Annotated[
    Literal["off", "default", "reduce-overhead", "max-autotune"],
    BeforeValidator(_on_off),
    WithJsonSchema({"enum": ["off", "default", "reduce-overhead", "max-autotune", False]}),
]


class Section(BaseModel):
    """A frozen group of keys that rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True)
class ShortForm:
    """Accept `key: value` for `key: {field: value}`, in the config and in its JSON Schema."""

    field: str

    def expand(self, value: Any) -> Any:
        return value if isinstance(value, dict | BaseModel) else {self.field: value}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        section = handler(schema)
        value = dict(handler.resolve_ref_schema(section)["properties"][self.field])
        return {"anyOf": [{key: value[key] for key in value if key not in ("default", "description")}, section]}


class OneOrMore:
    """Accept a single item instead of a tuple, in the config and in its JSON Schema."""

    def expand(self, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else [value]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [*many["items"].get("anyOf", [many["items"]]), many]}


Unit = Literal["steps", "epochs", "tokens"]
# The look-ahead requires a non-zero digit, so that editors reject "0 steps" as well.
_PATTERN = re.compile(
    r"^\s*((?=[0-9_.]*[1-9])[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(steps?|epochs?|tokens?)\s*$"
)


@dataclass(frozen=True)
class Duration:
    """A length of training. Steps and tokens are integers; epochs may be fractional ("0.5 epochs")."""

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
        examples = ["200 steps", "3 epochs", "1e6 tokens"]
        title = "a length such as 200 steps, 3 epochs or 1e6 tokens"
        return {"type": "string", "title": title, "pattern": _PATTERN.pattern, "examples": examples}
