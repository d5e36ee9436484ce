"""The config as a JSON Schema (draft 2020-12): editors that hold it accept exactly what a run accepts.

Two things only a run can see: whether files exist, and that "1.5 steps" is not a whole number of steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from surefoot.config.durations import Duration
from surefoot.config.schema import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Generator(GenerateJsonSchema):
    """Without titles that repeat the keys; durations as they are written."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        return str(dft) if isinstance(dft, Duration) else super().encode_default(dft)


@cache
def config_schema() -> dict[str, Any]:
    """One shared dictionary: read it, do not change it."""
    schema = RunConfig.model_json_schema(schema_generator=_Generator)
    return {"$schema": DIALECT, **schema, "title": "surefoot config"}
