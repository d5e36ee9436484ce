"""Choose the models beside the trained one, and their memory: the reference of dpo, kto and a loss of tokens, the
teacher of distill."""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.method_facts.losses import NO_REFERENCE
from surefoot.planning.memory import base_bytes
from surefoot.planning.notes import Notes
from surefoot.planning.plan import Choice
from surefoot.planning.ppo import frozen_bytes
from surefoot.planning.workload import Workload

ADAPTER_OFF, MODEL, CACHED, NONE = "adapter-off", "model", "cached", NO_REFERENCE
_WHY = {
    ADAPTER_OFF: "the base under the adapter: no second copy in memory",
    MODEL: "a second copy of the base, frozen, held as the base is",
    CACHED: "the base's log-probabilities are computed once before step 1 and stored in the cache folder",
}


def plan_reference(config: RunConfig, notes: Notes) -> Choice[str] | None:
    """Return one of the names above, or the folder or hub id of another model; None if the stage has no reference."""
    if not (config.method.reference or config.needs_reference):
        return None
    if config.method.rollouts and not config.needs_reference:  # grpo.kl is 0
        return None
    if not config.needs_reference:
        return Choice(NONE, f"{config.alignment.loss} only compares the two answers with each other", "default")
    requested = config.alignment.reference
    if requested == "auto":
        chosen = ADAPTER_OFF if config.adapter else MODEL
        why = _WHY[chosen] if config.adapter else f"{_WHY[chosen]}: all weights of the policy train"
        if config.adapter and config.adapter.initial:
            here = (
                "name the result here, or as the model," if config.method.reference else "take the result as the model,"
            )
            notes.caution(
                f"the reference is the base without {config.adapter.initial}, from which training starts: the model is "
                f"already away from it. To compare with the start, merge it (surefoot export --merge) and {here} "
                "with a new adapter"
            )
        return Choice(chosen, why, "default")
    return Choice(requested, f"asked for: {_WHY.get(requested, 'another model, counted as large as this one')}", "user")


def with_reference(reference: Choice[str] | None, config: RunConfig, work: Workload) -> Workload:
    """Return the workload with the reference: a second model in memory, and for a loss of tokens its distributions."""
    if reference is None:
        return work
    second = reference.value not in (ADAPTER_OFF, CACHED, NONE)
    numbers = _NUMBERS if config.method.learns_tokens else 0
    return replace(work, beside=work.beside + (base_bytes(work) if second else 0), compared=numbers)


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
    # Whether its head can be computed outside of it is only known of a described family.
    work = replace(work, beside=work.beside + frozen_bytes(model, work), other_logits=model.family is None)
    return Choice(teacher.path, why, "user"), work
