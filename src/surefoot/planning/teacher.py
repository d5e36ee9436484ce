"""Plan the teacher of stage distill, and the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.families.model_facts import ModelFacts
from surefoot.planning.plan import Choice
from surefoot.planning.ppo import frozen_bytes
from surefoot.planning.workload import Workload

# Further fp32 numbers for each logit of a chunk: log-probabilities of student and teacher, the teacher's logits, the
# divergence's terms and its gradient, and what cross entropy beside it keeps.
_NUMBERS = 6


@dataclass(frozen=True)
class TeacherFacts:
    """path: as the config names it. model: facts of a teacher in memory; None if it is stored or on a server. other:
    what is there instead, in words."""

    path: str
    model: ModelFacts | None
    other: str = ""


def plan_teacher(teacher: TeacherFacts | None, work: Workload) -> tuple[Choice[str] | None, Workload]:
    """Return where the teacher's distributions come from, and the workload with it. Pure."""
    if teacher is None:
        return None, work
    work = replace(work, compared=_NUMBERS)
    model = teacher.model
    if model is None:
        return Choice(teacher.path, teacher.other, "user"), work
    dtype = work.precision.unpacked if work.adapter else work.precision.compute.value
    why = f"a frozen model of {model.parameters:,} parameters in {dtype}, not sharded: every process has all of it"
    whole = model.family is None or bool(model.family.beyond_head)  # its head cannot be computed outside of it
    work = replace(work, beside=work.beside + frozen_bytes(model, work), other_logits=whole)
    return Choice(teacher.path, why, "user"), work
