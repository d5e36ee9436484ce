"""What the keys of a config are made of: numbers that are numbers, switches, groups of keys and their short forms."""

from __future__ import annotations

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
    """Pydantic would take "16" and true for numbers; an editor that holds the JSON Schema would not."""
    if isinstance(value, bool | str):
        raise ValueError("not a number")
    return value


def _on_off(value: Any) -> Any:
    """`true`/`false` are accepted for `on`/`off`: in YAML 1.2 the latter are strings."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Number = BeforeValidator(_number)  # stands last, so that the bounds reach the number itself and the JSON Schema
Count = Annotated[int, Field(ge=1), Number]
Positive = Annotated[float, Field(gt=0), Number]
NonNegative = Annotated[float, Field(ge=0), Number]
Share = Annotated[float, Field(ge=0, lt=1), Number]
Text = Annotated[str, Field(min_length=1)]
Flag = Annotated[bool, Strict()]
Switch = Annotated[
    Literal["auto", "on", "off"], BeforeValidator(_on_off), WithJsonSchema({"enum": ["auto", "on", "off", True, False]})
]
CompileMode = Annotated[
    Literal["off", "default", "reduce-overhead", "max-autotune"],
    BeforeValidator(_on_off),
    WithJsonSchema({"enum": ["off", "default", "reduce-overhead", "max-autotune", False]}),
]


class Section(BaseModel):
    """A frozen group of keys: unknown keys are refused, NaN and infinity are no numbers."""

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
    """Accept one item where a tuple of them belongs, in the config and in its JSON Schema."""

    def expand(self, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else [value]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [*many["items"].get("anyOf", [many["items"]]), many]}
