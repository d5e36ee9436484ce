"""The plainest way to compute what a run computes, which everything faster is held against: attention by the textbook,
every example in a row of its own, no kernel of surefoot's, nothing compiled.

    plain = plainly(config)

Doctor, tune and the benchmarks each add in which type products are, and how much goes through the model at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.config.dump import plain_config
from surefoot.config.overrides import with_settings
from surefoot.config.schema import KernelsConfig, RunConfig
from surefoot.planning.plan import PLAIN

PLAINEST: Mapping[str, str] = {  # dotted key -> value, short forms among them
    "attention": "eager",
    "data.packing": "off",
    "compile": "off",
    **{f"kernels.{name}": PLAIN for name in KernelsConfig.model_fields},
}


def plainly(config: RunConfig) -> RunConfig:
    """The config with these in place of what it has."""
    return RunConfig.model_validate(with_settings(plain_config(config), PLAINEST))


def plain_kernels() -> KernelsConfig:
    """None of surefoot's."""
    return KernelsConfig.model_validate(dict.fromkeys(KernelsConfig.model_fields, PLAIN))
