"""`surefoot export`: write a trained model for other programs, with proof that it equals what was trained."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.options import FiniteRange, check_models
from surefoot.commands.terminal import echo

if TYPE_CHECKING:
    from surefoot.runs.export.model import Exported

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?I?B)?", re.IGNORECASE)


class ByteSize(click.ParamType[int]):
    """A size in bytes, written as 5GB, 500MB, 2GiB or a plain number."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = _SIZE.fullmatch(str(value).strip())
        size = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found and found[2] != "IB" else 0
        if size < 1:
            self.fail(f"{value!r} is not a size; write it like 5GB or 500MB", param, ctx)
        return size


@click.command()
@click.argument("model")
@click.option(
    "--adapter", "adapters", multiple=True, help="An adapter to apply to MODEL; several are merged in this order."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to write.")
@click.option(
    "--merge", is_flag=True, help="Merge adapter and base into one model; otherwise only the adapter is exported."
)
@click.option(
    "--dtype",
    type=click.Choice(["stored", "bf16", "fp16", "fp32"]),
    default="stored",
    help="Data type of the written weights; stored: that of the base.",
)
@click.option("--max-shard-size", type=ByteSize(), default="5GB", show_default=True, help="Largest size of one file.")
@click.option("--device", type=click.Choice(["cpu", "auto"]), default="cpu", help="Where to compute.")
@click.option("--gguf", is_flag=True, help="Also write a GGUF file, for llama.cpp and Ollama.")
@click.option("--modelfile/--no-modelfile", default=True, help="Whether to write a Modelfile for Ollama.")
@click.option(
    "--drop-bos-scale", is_flag=True, help="Allow losing a scaled BOS embedding if the format cannot keep it."
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompts for the comparison, one per line.",
)
@click.option(
    "--threshold",
    type=FiniteRange(min=0, min_open=True),
    help="Allowed change of logits by rounding to --dtype, as a share of the largest.",
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in --out.")
@click.option(
    "--as", "tool", type=click.Choice(["llamafactory", "axolotl", "trl"]), help="Write a config of this tool instead."
)
@click.pass_context
def export(
    ctx: click.Context, model: str, adapters: tuple[str, ...], out: Path, tool: str | None, **options: Any
) -> None:
    """Write MODEL (a run, an adapter or a model) for other programs.

    An adapter is merged in fp32 and compared with the trained model before anything is published; export.json holds the
    proof.

    With --as, MODEL is a config: it is written as one of the tool's, with an account of every key.
    """
    if tool is not None:
        from surefoot.commands.export_config import export_config

        others = [name for name in ctx.params if name not in ("model", "out", "tool", "overwrite")]
        for name in others:
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--as writes a config, for which --{name.replace('_', '-')} says nothing", ctx)
        export_config(tool, Path(model), out, overwrite=options["overwrite"])
        return
    from surefoot.methods.requests import require_mergeable
    from surefoot.report.cards.export import CERTIFICATE
    from surefoot.system.folders import require_replaceable

    require_replaceable(out, options["overwrite"], CERTIFICATE, "export", lambda record: record["outputs"])
    for adapter in adapters or (None,):
        if (named := check_models(model, adapter)) is not None:
            require_mergeable(model, merge=options["merge"], gguf=options["gguf"], adapted=named.adapted)

    from surefoot.runs.export.model import export_model

    exported = export_model(model, out, adapters=adapters, **options)
    _tell(exported)


def _tell(exported: Exported) -> None:
    from surefoot.models.convert.source import VALUE_HEAD_FILE
    from surefoot.report.cards.export import CERTIFICATE, check_lines
    from surefoot.system.messages import size_text

    record = exported.record
    for caution in exported.cautions:
        echo(f"caution: {caution}", err=True)
    for line in check_lines(record):
        echo(line)
    if "tensors" in record:
        echo(f"{record['tensors']['count']:,} tensors are read back unchanged")
    echo(f"\nfiles in {exported.folder}:")
    sizes = {name: file["size"] for name, file in record["outputs"].items()}
    sizes[CERTIFICATE] = (exported.folder / CERTIFICATE).stat().st_size
    width = max(map(len, sizes))
    for name, size in sizes.items():
        echo(f"  {name:<{width}}  {size_text(size):>9}")
    if "tensors" in record:
        folder = shlex.quote(str(exported.folder))
        command = f"evaluate reward {folder} DATA" if VALUE_HEAD_FILE in sizes else f"chat {folder}"
        echo(f"\nnext:\n  surefoot {command}")
