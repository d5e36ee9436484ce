"""Going on with a run: what `resume_from_checkpoint` means, and whether what it names is there.

    resume_argument(draft, "resume_from_checkpoint", output)      # a rule: --resume, and what must be there
    check_resumed(translation, options)                           # where folders may be looked at

surefoot goes on from the newest checkpoint of the run folder that verifies, and from no other. Without any it starts,
which is right for a tool that looks for one by itself, and wrong where somebody named one: transformers raises there.
"""

from __future__ import annotations

import posixpath
from typing import Any

from surefoot.interop.draft import Draft
from surefoot.interop.launch import Options
from surefoot.interop.translation import Translation
from surefoot.system.errors import Fault, InputError

_NEWEST = "the newest checkpoint in the run folder that verifies, with optimizer and schedule"


def is_asked(value: Any) -> bool:
    return value is not None and str(value).lower() not in ("false", "none", "")


def resume_argument(draft: Draft, name: str, output: str) -> bool:
    """A checkpoint of the run folder itself becomes --resume, and must be there; another one cannot be begun with.
    Whether the run goes on."""
    given = draft[name]
    if not is_asked(given):
        draft.drop("asks for nothing", name)
        return False
    run, folder = posixpath.normpath(output), posixpath.normpath(str(given))
    anything = str(given).lower() == "true"
    if not anything and run not in (folder, posixpath.dirname(folder)):
        fix = f"name the run folder ({output}), or one of its checkpoints"
        draft.refuse(
            name, f"{given} does not lie in the run folder; surefoot resumes a run in its own folder only", fix
        )
        return False
    draft.arguments.append("--resume")
    draft.resumes = run if anything else folder
    draft.note(name, "changed", _NEWEST, "--resume")
    return True


def check_resumed(found: Translation, options: Options) -> None:
    """Raises InputError where the checkpoint that was named is not the one that surefoot would go on from. Nothing is
    checked where folders may not be looked at."""
    if found.resumes is None or options.newest is None:
        return
    run, _, name = found.resumes.rpartition("/")
    if found.resumes == posixpath.normpath(str(found.config.get("output", ""))):
        run, name = found.resumes, ""
    newest = options.newest(run)
    where = next((note.where for note in found.notes if "--resume" in note.keys), run)
    if newest is None:
        raise InputError(
            Fault(
                where,
                f"{run} holds no checkpoint to resume from",
                "leave it out to start anew",
                code="SF-CHECKPOINT-NONE",
            )
        )
    if name and name != newest:
        what = f"{found.resumes} is not what surefoot would resume from: the newest that verifies is {newest}"
        raise InputError(
            Fault(
                where,
                what,
                f"name {run}/{newest}, or the checkpoints of a copy that ends with yours",
                code="SF-RESUME-CHANGED",
            )
        )
