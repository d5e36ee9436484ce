"""An environment for the answers of stage grpo: opened under a run's plan, and its scores as one of the rewards."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Turn
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.segments import TextEncoder
from surefoot.data.tokenize.turns import TurnMarks
from surefoot.methods.environments.multi_turn import ENVIRONMENT, MultiTurn
from surefoot.methods.environments.opened import Environment, open_environment
from surefoot.methods.environments.recorded import Recorded
from surefoot.methods.method import Notify
from surefoot.methods.rewards.terms import Reward
from surefoot.methods.rollouts import Totals
from surefoot.methods.sources import template_in_use
from surefoot.methods.waiting import WaitReporter
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
    planned = tokens.template.value if config.data.template_arguments else name
    template = make_template(template_in_use(config, planned), encoder, tokens.stop.value)
    marks = TurnMarks(template, encoder, tokens.bos_id if tokens.bos.value else None)
    marks.after_answer([Turn(role, "A")])
    return marks


def open_multi_turn(
    config: RunConfig,
    environment: Environment,
    marks: TurnMarks,
    tokenizer: PreTrainedTokenizerBase,
    recorded: Recorded,
    totals: Totals,
    waits: WaitReporter,
    notify: Notify,
) -> MultiTurn:
    term = config.grpo.environment
    assert term is not None
    return MultiTurn(
        environment=environment,
        marks=marks,
        tokenizer=tokenizer,
        turns=term.turns,
        seconds=term.seconds,
        recorded=recorded,
        anywhere=lambda own: bool(totals([float(own)])[0]),
        waits=waits,
        notify=notify,
    )
