"""`surefoot push`: verify the model of a finished run once more and upload it to the hub.

Checkpoints, optimizer, logs, records and pictures are not uploaded. Every file is searched for paths of this machine,
which would reveal its user's name. The card may be edited by hand, so only it may differ from what the run wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from surefoot.commands.terminal import echo
from surefoot.config.schema import RunConfig
from surefoot.families.files import read_json
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.system.errors import Fault, InputError, IntegrityError
from surefoot.system.folders import require_run
from surefoot.system.hub_push import push_files, require_right
from surefoot.system.locations import check_name, looks_local
from surefoot.system.messages import counted
from surefoot.training.manifest import check_files


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("name", metavar="[OWNER/]NAME")
@click.option("--public", is_flag=True, help="Create a public repository instead of a private one.")
@click.option("--base", metavar="OWNER/NAME", help="Hub id of an adapter's base, if it was trained on a local folder.")
@click.option("--dry-run", is_flag=True, help="List what would be uploaded without contacting the hub.")
def push(run: Path, name: str, public: bool, base: str | None, dry_run: bool) -> None:
    """Upload the model, tokenizer and card of RUN to the hub as OWNER/NAME; without OWNER, in your account.

    Every file is verified first, except the card, which you may edit. Checkpoints, optimizer, logs and records are not
    uploaded.
    """
    check_name(name, own=True)
    require_run(run)

    if not dry_run:
        echo(f"pushed: {push_run(run, name, public=public, base=base)}")
        return
    files = pushed_files(run, base)
    for file in files:
        echo(f"{file.size:>16,}  {file.name}")
    total, kind = sum(file.size for file in files), "public" if public else "private"
    echo(f"{total:>16,}  bytes in {counted(len(files), 'file')} would go to {name} ({kind}); nothing was sent")


CARD = "README.md"
BASE = "base_model_name_or_path"  # key of adapter_config.json
_MODEL = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(adapter_|generation_)?config\.json|"
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt|chat_template\.jinja|README\.md|"
    r"bos_zero_config\.json|value_head\.safetensors"
)
_VOCABULARY = re.compile(r"tokenizer\.(json|model)|added_tokens\.json|vocab\..*|merges\.txt|.*\.safetensors")
_ABSOLUTE = re.compile(r"(?<![\w:/.<])(?:/[\w.~-]+){2,}|\b[A-Za-z]:\\[\w\\.-]+")


@dataclass(frozen=True)
class Upload:
    """A file to upload. size: in bytes. content: the bytes to send if they differ from the local file, else None."""

    name: str
    size: int
    content: bytes | None = None


def pushed_files(run: Path, base: str | None = None) -> list[Upload]:
    """Return model, tokenizer and card of a finished run.

    base: hub id of an adapter's base that was a local folder.

    Raises InputError for an unfinished run and for a file that contains a path of this machine, IntegrityError for a
    file that is not as written.
    """
    from surefoot.report.verification import is_finished

    require_run(run)
    if not is_finished(run):
        raise InputError(
            Fault(str(run), "is not a finished run", "finish it with `surefoot train … --resume`", code="SF-USE-FOLDER")
        )
    # An allowlist of names: logs or the user's notes in the folder are never uploaded.
    checks = [check for check in check_files(run) if _MODEL.fullmatch(check.name)]
    if faults := [check.fault for check in checks if check.fault and check.name != CARD]:
        raise IntegrityError(faults)
    if not (run / CARD).is_file():
        raise InputError(
            Fault(str(run / CARD), "is missing", "resume the run, which writes the card", code="SF-USE-FOLDER")
        )
    changed = _with_base(run, base)
    contents = {check.name: changed.get(check.name) for check in checks}
    faults = [fault for name, content in contents.items() for fault in _paths(run / name, content)]
    if faults:
        raise InputError(faults)
    return [
        Upload(name, (run / name).stat().st_size if content is None else len(content), content)
        for name, content in contents.items()
    ]


def push_run(run: Path, name: str, *, public: bool, base: str | None = None) -> str:
    """Upload and return the address. Raises like `pushed_files` and `push_files`."""
    check_name(name, own=True)
    files = {one.name: run / one.name if one.content is None else one.content for one in pushed_files(run, base)}
    return push_files(name, files, public=public, message=f"Model of the run {run.resolve().name}")


def check_push(config: RunConfig, name: str) -> None:
    """Check before a run that its model can be uploaded privately. Raises InputError for an adapter on a local folder,
    whose hub id only `surefoot push` accepts, and like `check_name` and `require_right`.
    """
    check_name(name, own=True)
    if config.adapter is not None and looks_local(config.model.path):
        what = f"the adapter's base is a folder of this machine, {config.model.path}"
        raise InputError(
            Fault(
                "--push",
                what,
                f"train without --push, then: surefoot push RUN {name} --base OWNER/NAME",
                code="SF-HUB-PUSH",
            )
        )
    require_right(name, public=False)


def _with_base(run: Path, base: str | None) -> dict[str, bytes]:
    """adapter_config.json with the base's hub id, if given. A base from the hub is recorded with its commit; without a
    commit it was a local folder, which nobody else has."""
    path = run / ADAPTER_CONFIG
    if not path.is_file():
        if base is not None:
            raise InputError(
                Fault("--base", f"is only for adapters, and {run} is a whole model", "leave it out", code="SF-HUB-PUSH")
            )
        return {}
    config: dict[str, Any] = read_json(path)
    if base is None:
        if config.get("revision") is None:
            what = f"its base is a folder of this machine, {config.get(BASE)}, which others do not have"
            raise InputError(
                Fault(str(path), what, "give the base's id on the hub: --base OWNER/NAME", code="SF-HUB-PUSH")
            )
        return {}
    check_name(base)
    if base == config.get(BASE):
        return {}
    return {path.name: (json.dumps({**config, BASE: base, "revision": None}, indent=2) + "\n").encode()}


def _paths(path: Path, content: bytes | None) -> Iterator[Fault]:
    """Faults for paths of this machine in a file to upload. Vocabularies contain words like /usr/bin, which are no
    paths."""
    if _VOCABULARY.fullmatch(path.name):
        return
    text = path.read_text(encoding="utf-8") if content is None else content.decode()
    if path.suffix == ".json":
        for key, value in _texts(json.loads(text)):
            if found := _ABSOLUTE.match(value):
                yield Fault(
                    f"{path}: {key}",
                    f"names a path of this machine: {found[0]}",
                    "remove it from the base model's file and train again",
                    code="SF-HUB-PUSH",
                )
        return
    card = path.name == CARD
    pattern = _ABSOLUTE if card else _own_folders(path)  # a base model's template may mention /usr/bin
    for number, line in enumerate(text.splitlines(), start=1):
        if found := pattern.search(line):
            fix = "edit the line, then push again" if card else "train with a template without it"
            yield Fault(f"{path}:{number}", f"names a path of this machine: {found[0]}", fix, code="SF-HUB-PUSH")


def _own_folders(path: Path) -> re.Pattern[str]:
    """The user's home folder, or the folder that contains the file."""
    folders = {Path.home(), path.resolve().parent} - {Path(path.anchor or "/")}
    return re.compile("|".join(re.escape(str(folder)) + r"(?![\w.-])" for folder in sorted(folders)))


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _texts(one, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one, key)
