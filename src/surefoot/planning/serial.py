"""Plans as JSON and back, exactly: a resumed run uses the plan that was saved, whatever this version would decide.

Reading goes through pydantic, so a plan that was edited into nonsense is refused with the place of the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from surefoot.planning.plan import RunPlan
from surefoot.system.errors import Fault, InputError

_PLAN = TypeAdapter(RunPlan)


@dataclass(frozen=True)
class Difference:
    """One value that differs between two plans or records. path: dotted, such as "batch.micro.value"."""

    path: str
    old: Any
    new: Any


def plan_to_json(plan: RunPlan) -> dict[str, Any]:
    """Plain lists, dicts, strings and numbers, in the order of the fields."""
    return _PLAN.dump_python(plan, mode="json")


def plan_from_json(data: object) -> RunPlan:
    """The inverse of `plan_to_json`, for whatever JSON holds. Raises InputError for anything that is not a plan."""
    try:
        return _PLAN.validate_python(data)
    except ValidationError as error:
        fix = "it was written by another version or edited"
        raise InputError(
            [Fault(_where(item["loc"]), item["msg"], fix, code="SF-CONFIG-CONFLICT") for item in error.errors()]
        ) from None


def _where(location: tuple[int | str, ...]) -> str:
    return f"plan: {'.'.join(map(str, location))}" if location else "plan"


def diff_plans(old: RunPlan, new: RunPlan) -> list[Difference]:
    """Values that differ, in the order of the fields. Reasons, cautions, measurements and whose words it was are not
    compared."""
    return diff_values(_decisions(old), _decisions(new))


def diff_values(old: Any, new: Any) -> list[Difference]:
    """Values that differ between two trees of dicts, in their order; None where a key is absent. Of a choice, its value
    alone counts: "reason" and "source" are not compared."""
    return list(_diff("", old, new))


def _decisions(plan: RunPlan) -> dict[str, Any]:
    values = asdict(plan)
    del values["measurements"], values["cautions"], values["origin"]
    return values


def _diff(path: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key not in ("reason", "source"):
                yield from _diff(f"{path}.{key}".lstrip("."), old.get(key), new.get(key))
    elif old != new:
        yield Difference(path, old, new)
