"""`surefoot export --as TOOL`: a surefoot config as one of another tool, with an account of every key."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.commands.options import load_or_exit
from surefoot.commands.terminal import echo
from surefoot.system.folders import CERTIFICATE, require_replaceable

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig


def export_config(tool: str, path: Path, out: Path, *, overwrite: bool) -> None:
    """Write the config at `path` for a tool into the folder `out`. Raises InputError."""
    from surefoot.commands.translate import reading_options
    from surefoot.config.keys import shown_key
    from surefoot.interop.backward import Ours
    from surefoot.interop.export import account, export, summary, targets
    from surefoot.runs.export.certificate import hashes
    from surefoot.system import durable, hardware

    require_replaceable(out, overwrite, CERTIFICATE, "export", lambda record: record["outputs"])
    loaded = load_or_exit(path)
    ours = Ours(loaded.config, out.as_posix(), _formats(loaded.config), reading_options())
    given = {shown_key(key) for key, origin in loaded.origins.items() if origin != "default"}
    target = targets()[tool]
    written = export(target, loaded.config, given, ours)
    texts = {target.file: written.text, **written.files}
    with durable.staged_folder(out, replace=overwrite) as folder:
        for name, text in texts.items():
            durable.write_text(folder / name, text)
        record = {"as": target.name, "command": written.command, "keys": [asdict(fate) for fate in written.fates]}
        outputs = hashes({name: folder / name for name in texts})
        durable.write_json(folder / CERTIFICATE, {**record, "versions": hardware.versions(), "outputs": outputs})
    for line in (f"{out / target.file}: {summary(written.fates)}", *account(written.fates)):
        echo(line)
    echo(f"\nnext:\n  {written.command}")


def _formats(config: RunConfig) -> dict[str, str]:
    """Return the formats of sources that leave theirs open, by path, where the file can be read."""
    from surefoot.data.formats.registry import FormatScan
    from surefoot.data.sources.resolve import SourceSpec, first_row
    from surefoot.system.errors import SurefootError
    from surefoot.system.locations import is_hub_data

    held = config.data.eval if isinstance(config.data.eval, tuple) else ()
    found: dict[str, str] = {}
    for source in (*config.data.train, *held):
        if is_hub_data(source.path) or source.name is not None:
            continue
        try:
            spec = SourceSpec(source.path, columns=source.columns, constant=source.constant, compose=source.compose)
            file, row = first_row(spec)
            texts, kind = config.method.plain_texts, config.method.records
            found[source.path] = FormatScan(kind, "auto", row, file.name, texts=texts).layout
        except (SurefootError, OSError):
            continue  # not on this machine
    return found
