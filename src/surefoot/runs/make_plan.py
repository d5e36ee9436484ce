"""Make a plan from a config: read the model's facts, detect the hardware, measure what is still open, and resolve.

`surefoot plan` and every training stage use it. The model's weights are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from surefoot.config.schema import RunConfig
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.models.facts import facts_of
from surefoot.models.folder import resolve_folder
from surefoot.planning.measurements import LengthFacts, measurements_from_json
from surefoot.planning.memory import fits, fits_host
from surefoot.planning.notes import as_trained
from surefoot.planning.plan import RunPlan
from surefoot.planning.ppo import Roles
from surefoot.planning.reference import TeacherFacts
from surefoot.planning.resolve import resolve
from surefoot.planning.ways import is_too_large, way_lines, ways_to_fit
from surefoot.report.trackers.adapters import require_trackers
from surefoot.runs.measured import measure_open_choices
from surefoot.runs.requirements import ranks_facts, require_libraries
from surefoot.system import hardware as machine
from surefoot.system import process
from surefoot.system.errors import Fault, InputError
from surefoot.system.hardware import Hardware
from surefoot.system.locations import is_address


def make_plan(
    config: RunConfig,
    *,
    hardware: Hardware | None = None,
    measure: bool = True,
    measurements: Mapping[str, object] | None = None,
    lengths: LengthFacts | None = None,
) -> RunPlan:
    """Return the plan of a run.

    config: the run's config.
    hardware: a preset to plan for; None detects this machine and, with `measure`, times products and attention on it.
    measure: whether to run measurements on this machine. The draft of the plan, which selects the tokenizer and raises
        all conflicts of the config, does not need them.
    measurements: measurements of an earlier plan; if given, nothing is measured.
    lengths: token lengths of the examples, if known. They come from data tokenized with an earlier plan, which has
        already raised any conflicts, so that none are looked for before the measurements.

    Raises InputError with all conflicts, and EnvironmentFault if a hub model cannot be reached or a requested library
    does not work here.
    """
    ranks = ranks_facts(config)
    folder = resolve_folder(config.model.path, config.model.revision, weights=False)
    model = as_trained(facts_of(folder), config)
    tokenizer = read_tokenizer_facts(folder)
    if config.data.max_pixels is not None:
        from surefoot.data.tokenize.picture_processor import check_max_pixels

        check_max_pixels(folder, config.data.max_pixels)
    environment = {} if hardware else process.read_environment()  # this machine's variables say nothing about a preset
    found = hardware or machine.detect()
    if hardware is None:
        require_libraries(config, found.kind)
        require_trackers(config.report_to)
    resolve_with = partial(
        resolve,
        model=model,
        tokenizer=tokenizer,
        hardware=found,
        environment=environment,
        lengths=lengths,
        roles=_roles(config, folder),
        teacher=_teacher(config, folder),
    )
    resolved = partial(resolve_with, config, ranks=ranks)
    seen = None if measurements is None else measurements_from_json(measurements)

    def what_fits() -> str:
        ways = ways_to_fit(
            config, lambda other, of: resolve_with(other, ranks=of, measurements=seen), model, found, lengths
        )
        return "\n".join(way_lines(ways))

    try:
        if seen is None and measure and not found.preset:
            if lengths is None:
                resolved(measurements=None)  # raises conflicts before the slow measurements
            process.bound_product_caches(found.kind)  # the probes compute this process's first products
            batch = cache(lambda: resolved(measurements=None).batch)
            seen = measure_open_choices(config, model, found, environment, lengths, batch)
            machine.forget_peak(found.kind)  # the probes' peak must not count as the run's
        plan = resolved(measurements=seen)
    except InputError as error:
        if is_too_large(error):
            error.add_note(what_fits())
        raise
    if seen is None and config.adapter is not None and config.adapter.initial is not None:
        from surefoot.methods.policy import find_initial

        find_initial(config, plan, folder)  # not for a resumed run, whose checkpoint has the adapter
    held = fits(plan.memory) and fits_host(plan.memory)
    return plan if held else replace(plan, cautions=(*plan.cautions, what_fits()))


def _roles(config: RunConfig, base: Path) -> Roles:
    """Return the models that PPO and GRPO use besides the policy. Other stages read no other models."""
    if config.method.critic:
        from surefoot.methods.ppo.models import find_roles
    elif config.method.rollouts and config.grpo.reward_models:
        from surefoot.methods.grpo.reward_models import find_roles
    else:
        return Roles()
    return find_roles(config, base)


def require_distillation(config: RunConfig, base: Path) -> None:
    """Raise InputError unless the config's stage has a teacher, a model with the tokenizer of the base."""
    if not config.method.teacher:
        what = f"stage {config.stage} has no teacher"
        fix = "use a config of a stage that has one"
        raise InputError(Fault("stage", what, fix, code="SF-CONFIG-CONFLICT"))
    facts = _teacher(config, base)
    if facts is not None and facts.model is None and not is_address(facts.path):
        what = f"{facts.path} contains stored distributions, not a model"
        raise InputError(Fault("distill.teacher", what, "name a model", code="SF-CONFIG-CONFLICT"))


def _teacher(config: RunConfig, base: Path) -> TeacherFacts | None:
    if not config.method.teacher or config.distill.teacher is None:
        return None
    from surefoot.methods.distill.teacher import find_teacher

    return find_teacher(config, base)
