"""What a Python caller may bring of its own: a loss, metrics, a way to read records. From the command line it is empty.

surefoot cannot look inside these functions. A resumed run must be given the same ones; what their records became is
compared by content, as data always is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from surefoot.config.nearest import nearest_word
from surefoot.config.schema import RunConfig
from surefoot.data.tokenise import ReadRecord
from surefoot.errors import Fault, InputError
from surefoot.evaluate.answers import METRICS, Metric
from surefoot.objectives.base import Objective


@dataclass(frozen=True)
class Custom:
    """objective: takes the place of the stage's loss. metrics: by the name that metrics.names lists. read_record: of
    data sources whose format is custom; returns messages or a text."""

    objective: Objective | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    read_record: ReadRecord | None = None

    @property
    def all_metrics(self) -> Mapping[str, Metric]:
        """Its own and those that surefoot has."""
        return {**METRICS, **self.metrics}


NOTHING = Custom()
_TAKEN = ("loss", "perplexity", "accuracy", "tokens", "runtime", "step", "none")  # columns of an evaluation's own


def check_metrics(config: RunConfig, known: Mapping[str, Metric]) -> None:
    """Raises InputError for a metric that nobody defines, or whose name an evaluation already uses."""
    faults = []
    for name in config.metrics.names:
        if name in _TAKEN:
            faults.append(Fault("metrics.names", f"{name!r} is a name that every evaluation uses", "choose another"))
        elif name not in known:
            near = nearest_word(name, list(known))
            fix = f"did you mean {near}?" if near else f"there are {', '.join(known)}; Python callers may bring more"
            faults.append(Fault("metrics.names", f"no metric is called {name!r}", fix))
    if faults:
        raise InputError(faults)
