"""`surefoot evaluate norms`: lengths of vectors and attention on the first token, layer by layer."""

from __future__ import annotations

from pathlib import Path

import click

from surefoot.commands.answering import bos_option, check_models, claim_out, introduce, model_options, said_either_way
from surefoot.commands.printing import echo_json


@click.command()
@model_options
@said_either_way("data", "Data as in data.train.  [default: a built-in text]")
@click.option("--template", help="Lay --data out with it.  [default: as the model was trained]")
@bos_option
@click.option("--max-samples", type=click.IntRange(min=1), default=32, show_default=True, help="Texts to measure.")
@click.option("--generate-samples", is_flag=True, help="Answer three fixed prompts too, by base and adapter.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for norms.json and pictures.")
@click.option("--overwrite", is_flag=True, help="Replace findings of another request in --out.")
def norms(
    model: str,
    adapter: str | None,
    data: str | None,
    template: str | None,
    bos: bool | None,
    max_samples: int,
    generate_samples: bool,
    as_json: bool,
    out: Path | None,
    overwrite: bool,
) -> None:
    """Norms of MODEL's activations and RMSNorms by layer, first position against the rest, and how much attention the
    first position gets. With an adapter the base stands beside it.
    """
    from surefoot.methods.requests import DataRequest, check_request, norms_request

    if template is not None and data is None:
        raise click.UsageError("--template lays out the records of --data, and none are named")
    check_models(model, adapter)
    if data is not None:
        check_request(DataRequest(data, template))
    asked = norms_request(model, adapter, data, template, max_samples, generate_samples, bos)
    if out is not None:
        claim_out(out / "norms.json", asked, overwrite)

    import sys

    from surefoot.evaluate.measure_norms import measure_model_norms, norms_to_json, results_to_json
    from surefoot.report.console import open_console
    from surefoot.report.pictures.norms import layer_table, norm_table
    from surefoot.system import process

    found = measure_model_norms(
        model,
        adapter=adapter,
        data=data,
        template=template,
        bos=bos,
        out=out,
        generate_samples=generate_samples,
        texts=max_samples,
        overwrite=overwrite,
    )
    introduce(found.opened, template=False)
    if as_json:
        echo_json(norms_to_json(found, model, adapter))
        return
    console = open_console(sys.stdout, process.terminal_wishes())
    report = next(iter(found.reports.values()))
    console.say(f"{report.texts} texts, {report.tokens} tokens ({found.origin})")
    console.show(layer_table(results_to_json(found)))
    console.say()
    console.show(norm_table(results_to_json(found)))
    for sample in found.samples:
        console.say()
        for side, text in sample.items():
            console.say(f"{side}: {text}")
    if out is not None:
        console.say(f"in {out}: norms.json, {', '.join(found.pictures)}")
