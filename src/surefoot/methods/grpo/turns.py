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
from surefoot.families.templates import is_file
from surefoot.methods.environments.opened import open_environment
from surefoot.methods.environments.recorded import Recorded
from surefoot.methods.environments.talks import ENVIRONMENT, Talks
from surefoot.methods.method import LoadedModels, Notify, RunInputs
from surefoot.methods.rewards.terms import Reward
from surefoot.methods.waiting import Waits
from surefoot.planning.plan import TokenizerPlan
from surefoot.system.errors import Fault, InputError


def environment_reward(config: RunConfig) -> tuple[Reward, ...]:
    """The environment's scores as a reward; none without an environment. Raises InputError if it cannot be opened."""
    term = config.grpo.environment
    if term is None:
        return ()
    return (Reward(ENVIRONMENT, term.weight, lambda one: list(one.by_environment), open_environment(term).identity),)


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
    template = make_template(asked if is_file(asked) else name, encoder, tokens.stop.value)
    marks = TurnMarks(template, encoder, tokens.bos_id if tokens.bos.value else None)
    marks.after_answer([Turn(role, "A")])
    return marks


def check_environment(
    config: RunConfig, tokens: TokenizerPlan, tokenizer: PreTrainedTokenizerBase, data: PreparedData
) -> None:
    """Raises InputError, before a model is loaded, for what `open_talks` raises it."""
    if config.grpo.environment is not None:
        turn_marks(config, tokens, tokenizer, data, open_environment(config.grpo.environment).role)


def open_talks(run: RunInputs, loaded: LoadedModels, waits: Waits, notify: Notify) -> Talks | None:
    """None without an environment. Raises InputError if it cannot be opened, or has no place in the template."""
    config, engine, term = run.config, loaded.engine, run.config.grpo.environment
    if term is None:
        return None
    environment = open_environment(term)
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
