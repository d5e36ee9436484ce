"""`surefoot capture`: store the weights and activations of a model's layers, and compare two captures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.options import bos_option, check_models, model_options
from surefoot.commands.terminal import screen
from surefoot.system.messages import size_text

if TYPE_CHECKING:
    from surefoot.evaluate.capture_comparison import CaptureComparison

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@model_options
@click.option("--out", required=True, type=_FOLDER, help="Folder for the capture.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Length in tokens.  [default: 512, or that of --against]")
@click.option("--layers", default="all", show_default=True, help="Layer numbers and ranges, such as 0,5-7.")
@click.option(
    "--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A text, repeated or cut to --seq-len."
)
@click.option("--data", help="Data as in data.train; uses the first record with --seq-len tokens.")
@click.option("--template", help="Template for --data.  [default: as the model was trained]")
@bos_option
@click.option("--attention", is_flag=True, help="Also store attention maps, using eager attention.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Type to store in.  [default: as computed]")
@click.option(
    "--against", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A capture to compare with."
)
@click.option("--overwrite", is_flag=True, help="Replace a capture in --out.")
def capture(model: str, out: Path, against: Path | None, overwrite: bool, **options: Any) -> None:
    """Run MODEL once and store, for each layer, norms, matrices and activations with statistics and heat maps.

    Compared captures use the same token ids: --against takes them from the earlier one. If MODEL is itself a capture,
    the two are compared and nothing is run.
    """
    from surefoot.evaluate.capture_folder import is_capture, open_capture, require_room
    from surefoot.methods.requests import (
        DataRequest,
        check_request,
        layer_numbers,
        require_maps,
        require_positions,
        usual_tokens,
        written_text,
    )
    from surefoot.system.errors import Fault, InputError

    if is_capture(Path(model)):
        if against is None:
            raise InputError(
                Fault(
                    model,
                    "is a capture",
                    "add --against ANOTHER to compare the two, or name a model",
                    code="SF-USE-FOLDER",
                )
            )
        if any(value not in (None, False, "all") for value in options.values()) or options["bos"] is not None:
            raise click.UsageError("options for a new capture cannot be used to compare two captures")
        _compare(against, Path(model), out, overwrite)
        return
    text, data, template, seq_len = (options[name] for name in ("text", "data", "template", "seq_len"))
    if text and data:
        raise click.UsageError("give a text by --text or records by --data, not both")
    if template is not None and data is None:
        raise click.UsageError("--template needs --data")
    named = check_models(model, options["adapter"])
    if data is not None:
        check_request(DataRequest(data, template))
    require_room(out, overwrite, against)
    reference = open_capture(against) if against is not None else None
    if text is not None:
        written_text(text)
    if named is not None:
        positions = named.facts.max_positions
        layer_numbers(options["layers"], named.facts.layers)
        require_positions("--seq-len", seq_len or 1, positions)
        if options["attention"] and text is None and data is None:
            requested = seq_len or (len(reference.ids) if reference else usual_tokens(positions))
            require_maps(named.facts, requested)

    from surefoot.evaluate.capture import capture as run_capture
    from surefoot.report.capture import layer_table, warning_lines

    captured = run_capture(model, out, against=against, overwrite=overwrite, **options)
    console = screen()
    console.say(captured.described)
    for caution in captured.cautions:
        console.say(f"caution: {caution}", style="yellow")
    index = captured.index
    console.show(layer_table(index))
    for line in warning_lines(index):
        console.say(line, style="red")
    held = size_text(index["held_bytes_at_most"])
    console.say(f"{len(index['tensors'])} tensors of {len(index['layers'])} layers over {len(index['ids'])} tokens")
    stored = list(dict.fromkeys(entry["file"] for entry in index["tensors"]))
    tensors = stored[0] if len(stored) == 1 else f"{stored[0]} to {stored[-1]} ({len(stored)} files)"
    names = ", ".join(["index.json", tensors, *captured.pictures])
    console.say(f"in {out}: {names}; at most {held} in memory at once")
    if captured.comparison is not None:
        _show_comparison(captured.comparison, out)


def _compare(reference: Path, other: Path, out: Path, overwrite: bool) -> None:
    from surefoot.evaluate.capture_folder import open_capture, require_room_to_compare

    open_capture(reference)
    require_room_to_compare(out, overwrite)

    from surefoot.evaluate.capture import compare_folders

    _show_comparison(compare_folders(reference, other, out, overwrite=overwrite), out)


def _show_comparison(found: CaptureComparison, out: Path) -> None:
    from surefoot.report.capture import difference_table

    console = screen()
    console.say(f"A {found.reference}, B {found.other}")
    for note in found.notes:
        console.say(f"caution: {note}", style="yellow")
    console.show(difference_table(found.differences))
    console.say(f"every tensor: {out / 'comparison.json'}; picture: {out / 'comparison.png'}")
