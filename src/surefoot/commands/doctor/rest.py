"""The checks that left no line: what they found in order, or why they do not apply. So every code is accounted for."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.commands.doctor.codes import CODES
from surefoot.commands.doctor.findings import Finding, ok
from surefoot.config.schema import RunConfig

# What was looked at on the way, and is only told where it is not so.
_IN_ORDER = {
    "ENV-UNREAD": "none is set",
    "CONFIG": "no conflict",
    "ENVIRONMENT": "all there",
    "PLAN": "it warns of nothing",
    "DTYPE-CONFLICT": "they go together",
    "DATA": "every record was read",
    "DATA-AUDIT": "it warns of nothing",
    "MODEL": "whole and finite",
}
_NOT_IN_PPO = {
    "TOK-STOP": "stage ppo learns from answers that the policy writes itself",
    "LABEL-NONE": "stage ppo learns from answers that the policy writes itself",
    "LOSS-FALLING": "does not apply: in stage ppo the reward is to rise, and the loss of other answers says nothing",
}


def rest(config: RunConfig | None, seen: Iterable[Finding]) -> list[Finding]:
    """A line for every code that an examination without a fault left out; without a config, of the machine alone."""
    told = {one.code for one in seen}
    groups = {"machine"} if config is None else {code.group for code in CODES.values()}
    left = [name for name, code in CODES.items() if code.group in groups and name not in told]
    return [ok(name, _why(name, config)) for name in left]


def _why(name: str, config: RunConfig | None) -> str:
    if name in _IN_ORDER or config is None:
        return _IN_ORDER.get(name, "nothing to measure on this machine")
    adapter = config.adapter
    if name == "ADAPTER-TARGETS":
        return "all there and linear" if adapter else "does not apply: no adapter, all weights train"
    if name == "ROW-ZERO-NORM":
        return "none" if adapter and adapter.kind == "dora" else "does not apply: DoRA alone divides by norms"
    if config.method.rollouts and name in _NOT_IN_PPO:
        return _NOT_IN_PPO[name]
    return "does not apply to these steps"
