"""A run before its models are loaded, as one value: every part of the run that comes later is handed this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.methods.method import Stage
from surefoot.planning.plan import RunPlan
from surefoot.runs.revisions import Commits
from surefoot.runs.run_folder import Claim
from surefoot.runs.timetable import Timetable


@dataclass(frozen=True)
class Prepared:
    """All that is known before the model is loaded and the run folder is touched. config: with the commits in place of
    the hub's branches. base: folder of the base model. identity: see `run_identity`."""

    config: RunConfig
    commits: Commits
    found: Claim
    plan: RunPlan
    base: Path
    tokenizer: PreTrainedTokenizerBase
    stage: Stage
    timetable: Timetable
    identity: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.found.folder

    @property
    def resumed(self) -> bool:
        """Whether it goes on from a checkpoint."""
        return self.found.checkpoint is not None
