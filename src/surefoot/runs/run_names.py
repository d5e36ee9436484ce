"""Which names in a run folder are the run's own. What else lies there, as a user's notes or a launcher's log, is not
for a run to delete."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from surefoot.families.files import TOKENIZER_FILES
from surefoot.report import html, profile, results
from surefoot.report.log_copies import LOGS
from surefoot.report.trackers import adapters
from surefoot.runs import base_bytes, records, rollback_record
from surefoot.system.errors import IntegrityError
from surefoot.system.made_folders import AVERAGE, CONFIG, CRITIC_FOLDER, MANIFEST, PLAN
from surefoot.training.checkpoint import TRAINER_STATE, list_checkpoints
from surefoot.training.manifest import read_manifest

# Also what a killed process left, which no manifest lists: weights in any number of files, and the checkpoints that a
# resumed run set aside.
_PATTERN = re.compile(
    r"(\.rejected-)?checkpoint-\d+|failure-\d+(-.+)?|training_(loss|eval_\w+)\.png|(adapter_|generation_)?config\.json"
    r"|(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
_NAMES = {
    *(PLAN, CONFIG, MANIFEST, AVERAGE, CRITIC_FOLDER, TRAINER_STATE, "README.md"),
    *(records.ENVIRONMENT, records.DATA, records.ORIGIN, base_bytes.RECORD, rollback_record.RECORD),
    *(results.TRAIN, results.EVAL, results.ALL, html.NAME, profile.FOLDER, adapters.FOLDER),
    *LOGS,
    *TOKENIZER_FILES,
}


def written_by_run(run: Path) -> Callable[[str], bool]:
    """Whether a file or folder of this name is one that a run writes, or that a manifest in this one lists."""
    listed: set[str] = set()
    for place in (run, *(checkpoint.folder for checkpoint in list_checkpoints(run))):
        with suppress(IntegrityError):
            listed |= {Path(name).parts[0] for name in read_manifest(place)["files"]}
    return lambda name: name in _NAMES or name in listed or _PATTERN.fullmatch(name) is not None
