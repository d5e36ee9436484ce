"""One NaN or infinity, put at random into a loss, an activation, a gradient or a moment of a training step."""

import math
import random

import torch

from faults.trials import Trial
from helpers.toy_model import (
    bits,
    same_bits,
    save_checkpoint,
    settings,
    toy_batches,
    toy_engine,
    toy_examples,
    toy_loss,
)
from surefoot.system.errors import Diverged
from surefoot.training.engine import SingleEngine
from surefoot.training.objective import LossSum
from surefoot.training.report import StepReport
from surefoot.training.state import RunState
from surefoot.training.step import train_step

PLACES = ("loss", "activation", "gradient")
VALUES = (math.nan, math.inf, -math.inf)


def take(engine: SingleEngine, step: int, objective=toy_loss) -> StepReport:
    batches = toy_batches(toy_examples(6), 2)
    return train_step(engine, objective, batches, step=step, lr=0.05, scale=None, settings=settings())


def poison_once(trial: Trial) -> str:
    """A few clean steps, one with a poisoned number somewhere, one more clean one. Returns "" where the poisoned one
    was caught in itself and cost nothing."""
    draw = trial.draw
    engine, bad = toy_engine(), draw.randint(1, 5)
    for step in range(1, bad):
        take(engine, step)
    before, where = bits(engine), draw.choice(PLACES)
    report = _poisoned_step(engine, bad, where, draw)
    told = (report.loss, report.grad_norm)
    if report.decision != "non_finite":
        return f"{where} at step {bad}: {report.decision}, {told}"
    if not same_bits(bits(engine), before):
        return f"{where} at step {bad}: weights or moments changed"
    if any(value is not None and not math.isfinite(value) for value in told) or None not in told:
        return f"{where} at step {bad}: logged as {told}"
    if take(engine, bad + 1).decision != "stepped":
        return f"{where} at step {bad}: the next step did not go on"
    return ""


def _poisoned_step(engine: SingleEngine, step: int, where: str, draw: random.Random) -> StepReport:
    value, calls, bad_call = draw.choice(VALUES), 0, draw.randint(1, 3)  # of three micro-batches
    if where == "loss":

        def objective(model, batch):
            nonlocal calls
            calls += 1
            out = toy_loss(model, batch)
            return LossSum(out.loss + value, out.sums) if calls == bad_call else out

        return take(engine, step, objective)
    if where == "gradient":
        chosen = draw.choice(sorted(engine.parameters))
        place = draw.randrange(engine.parameters[chosen].numel())

        def spoil(gradient):
            spoiled = gradient.clone()
            spoiled.flatten()[place] = value
            return spoiled

        handle = engine.parameters[chosen].register_hook(spoil)
    else:
        # Behind tanh an infinity is 1, and a logit of -inf is a probability of 0: only what can do harm is put in.
        name = draw.choice(["embed", "hidden", "head"])
        value = math.inf if name == "head" and value == math.inf else math.nan

        def spoil(module, arguments, output):
            nonlocal calls
            calls += 1
            return output + torch.full_like(output, value) if calls == bad_call else output

        handle = engine.model.get_submodule(name).register_forward_hook(spoil)
    try:
        return take(engine, step)
    finally:
        handle.remove()


def poison_moment_once(trial: Trial) -> str:
    """A moment that is not finite moves weights in the step in which it is used: no loss or gradient tells of it. It
    is caught in that step, named, and costs nothing but itself; once mended, the run goes on."""
    draw = trial.draw
    engine, bad = toy_engine(), draw.randint(2, 5)
    for step in range(1, bad):
        take(engine, step)
    name, entry = draw.choice(["hidden.weight", "head.weight", "hidden.bias"]), draw.choice(["exp_avg", "exp_avg_sq"])
    moment = engine.optimizer.state[engine.parameters[name]][entry]
    place = draw.randrange(moment.numel())
    before, good = bits(engine), moment.flatten()[place].item()
    moment.flatten()[place] = draw.choice(VALUES)
    report = take(engine, bad)
    if (report.decision, report.non_finite, report.moment) != ("non_finite", "moment", f"{name}/{entry}"):
        return f"{name}/{entry} at step {bad}: {report.decision}, {report.non_finite}, {report.moment}"
    try:
        save_checkpoint(trial.folder, engine, RunState(step=bad))
        return f"a checkpoint was written after step {bad}"
    except Diverged:
        moment.flatten()[place] = good
    if not same_bits(bits(engine), before):
        return f"{name}/{entry} at step {bad}: weights or other moments changed"
    if take(engine, bad + 1).decision != "stepped":
        return f"{name}/{entry} at step {bad}: the next step did not go on"
    return ""
