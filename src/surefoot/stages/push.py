"""A finished run goes to the hub: what was published, verified once more, and nothing else.

Checkpoints, optimizer, logs, records and pictures stay here. The card is read before it goes: a path of this machine in
it would tell strangers about its user.
"""

from __future__ import annotations

import re
from pathlib import Path

from surefoot.errors import Fault, InputError, IntegrityError
from surefoot.hub.push import push_files
from surefoot.report.verification import is_finished
from surefoot.training.checkpoint import FileCheck, check_files

CARD = "README.md"
_MODEL = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(adapter_|generation_)?config\.json|"
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|chat_template\.jinja|README\.md"
)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ABSOLUTE = re.compile(r"(?<![\w:/.<])(?:/[\w.~-]+){2,}|\b[A-Za-z]:\\[\w\\.-]+")


def pushed_files(run: Path) -> list[FileCheck]:
    """Model, tokenizer and card of a finished run, hashed. Raises InputError for a run that is not finished or whose
    card names a path, IntegrityError for a file that is not as it was written."""
    if not is_finished(run):
        raise InputError(Fault(str(run), "is no finished run", "finish it with `surefoot train … --resume`"))
    checks = [check for check in check_files(run) if _MODEL.fullmatch(check.name)]
    if faults := [check.fault for check in checks if check.fault]:
        raise IntegrityError(faults)
    _check_card(run / CARD)
    return checks


def push_run(run: Path, name: str, *, public: bool) -> str:
    """Upload and return the address. Raises as `pushed_files` and `push_files` do."""
    check_name(name)
    files = [check.name for check in pushed_files(run)]
    return push_files(name, run, files, public=public, message=f"Model of the run {run.resolve().name}")


def check_name(name: str) -> None:
    """Raises InputError where it is not owner/name."""
    if not _NAME.fullmatch(name):
        raise InputError(Fault(name, "is no name of a repository", "write it like owner/name"))


def _check_card(card: Path) -> None:
    if not card.is_file():
        raise InputError(Fault(str(card), "is missing", "resume the run: it writes the card"))
    faults = [
        Fault(f"{card}:{number}", f"names a path of this machine: {found[0]}", "edit the line, then push again")
        for number, line in enumerate(card.read_text(encoding="utf-8").splitlines(), start=1)
        if (found := _ABSOLUTE.search(line))
    ]
    if faults:
        raise InputError(faults)
