"""An environment for the answers of stage grpo: opened under a run's plan, and its scores as one of the rewards."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Turn
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.data.tokenize.turns import TurnMarks
from surefoot.families.templates import is_users_own
from surefoot.methods.environments.opened import Environment, open_environment
from surefoot.methods.environments.recorded import Recorded
from surefoot.methods.environments.talks import ENVIRONMENT, Talks
from surefoot.methods.method import LoadedModels, Notify, RunInputs
from surefoot.methods.rewards.terms import Reward
from surefoot.methods.waiting import Waits
from surefoot.planning.plan import TokenizerPlan
from surefoot.system.errors import Fault, InputError


def named_environment(config: RunConfig) -> Environment | None:
    """None if the config names none. Raises InputError or EnvironmentFault if it cannot be opened."""
    term = config.grpo.environment
    return None if term is None else open_environment(term)


def environment_reward(environment: Environment, weight: float) -> Reward:
    """The environment's scores as a reward."""
    return Reward(ENVIRONMENT, weight, lambda one: list(one.by_environment), environment.identity)


def turn_marks(
    config: RunConfig, tokens: TokenizerPlan, tokenizer: PreTrainedTokenizerBase, data: PreparedData, role: str
) -> TurnMarks:
    """The marks that the prompts are written in. Raises InputError if they have no place for what `role` says."""
    written = {audit.source.template for audit in data.sources}
    if len(written) > 1:
        what = f"the prompts are written by several templates: {', '.join(sorted(written))}"
        fix = "name one in data.template, so that an environment answers in its marks"
        raise InputError(Fault("data.template", what, fix, code="SF-ENVIRONMENT"))
    (name,) = written
    encoder = TextEncoder(tokenizer)
    asked = config.data.template
    template = make_template(asked if is_users_own(asked) else name, encoder, tokens.stop.value)
    marks = TurnMarks(template, encoder, tokens.bos_id if tokens.bos.value else None)
    marks.after_answer([Turn(role, "A")])
    return marks


def open_talks(run: RunInputs, loaded: LoadedModels, environment: Environment, waits: Waits, notify: Notify) -> Talks:
    """Raises InputError if it has no place in the template."""
    config, engine, term = run.config, loaded.engine, run.config.grpo.environment
    assert term is not None
    return Talks(
        environment=environment,
        marks=turn_marks(config, run.plan.tokenizer, run.tokenizer, run.task.data, environment.role),
        tokenizer=run.tokenizer,
        turns=term.turns,
        seconds=term.seconds,
        recorded=Recorded(Path(config.output), engine.rank, loaded.state.step),
        anywhere=lambda own: bool(engine.totals([float(own)])[0]),
        waits=waits,
        notify=notify,
    )
