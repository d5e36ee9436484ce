"""How does the scale of the BOS embedding change training? Five short runs and one page that compares them.

    python examples/bos_sweep.py MODEL DATA --out bos-sweep

MODEL is a folder or hub id, DATA what `data.train` takes. Each run trains LoRA (rank 16) on all linear layers with the
same data, seed and steps; only `bos.scale` differs. Then the norms inside each trained model are measured over the same
texts. What is left in --out: a run folder per scale, report.html (one file, opens anywhere) and sweep.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import surefoot
from surefoot.evaluate.norms import measure_model_norms, report_to_json
from surefoot.report import curves
from surefoot.report.comparison import overlay_page
from surefoot.report.curves import Chart, Line
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import Row, read_rows
from surefoot.report.views import Table
from surefoot.system import durable
from surefoot.system.errors import SurefootError

SCALES = (1.0, 0.2, 0.1, 0.05, 0.0)
SHOWN = 16  # positions in the charts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="folder or hub id of a base model")
    parser.add_argument("data", help="file, folder or hub data set to train on")
    parser.add_argument("--out", type=Path, default=Path("bos-sweep"), help="folder for runs and report")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--texts", type=int, default=16, help="texts that the norms are measured over")
    parser.add_argument("--scales", type=float, nargs="+", default=list(SCALES), help="the first is the reference")
    asked = parser.parse_args(arguments)
    try:
        found = sweep(asked)
        durable.write_json(asked.out / "sweep.json", found)
        durable.write_text(asked.out / "report.html", page(found))
    except SurefootError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"report: {asked.out / 'report.html'}")
    return 0


def sweep(asked: argparse.Namespace) -> dict[str, Any]:
    """Train and measure one run per scale. A run that is finished already is taken as it is."""
    runs: dict[str, Any] = {}
    for scale in asked.scales:
        folder = asked.out / f"scale-{scale:g}"
        surefoot.train(run_config(asked, scale, folder), resume=folder.exists())
        measured = measure_model_norms(str(folder), data=asked.data, max_samples=asked.texts)
        runs[f"{scale:g}"] = {
            "scale": scale,
            "log": read_rows(folder / LOG),
            "norms": report_to_json(measured.reports["adapter"]),
        }
    return {
        "model": asked.model,
        "data": asked.data,
        "steps": asked.steps,
        "batch": asked.batch_size,
        "lr": asked.lr,
        "runs": runs,
    }


def run_config(asked: argparse.Namespace, scale: float, folder: Path) -> dict[str, Any]:
    return {
        "stage": "sft",
        "model": asked.model,
        "adapter": {"kind": "lora", "rank": 16, "alpha": 32, "dropout": 0.1, "targets": "all-linear"},
        "data": {"train": asked.data, "max_length": asked.max_length},
        "optim": {"lr": asked.lr, "schedule": "cosine"},
        "batch": {"size": asked.batch_size},
        "duration": f"{asked.steps} steps",
        "bos": {"prepend": "on", "scale": scale},
        "output": str(folder),
    }


def page(found: Mapping[str, Any]) -> str:
    """One page for what `sweep` returned."""
    runs = {f"scale {name}": run for name, run in found["runs"].items()}
    positions = {name: run["norms"]["norm_by_position"] for name, run in runs.items()}
    layers = len(next(iter(positions.values()))) - 1
    by_layer = {name: run["norms"]["layers"] for name, run in runs.items()}
    charts = run_charts({name: run["log"] for name, run in runs.items()})
    into, out_of = "Norm by position, into layer 0", "Norm by position, out of the last layer"
    places = ((0, "before", into), (layers, "after", out_of))
    for row, key, title in places:
        charts.append(position_chart(key, title, {name: rows[row] for name, rows in positions.items()}, SHOWN))
    first = {name: [one["residual_in"]["first_norm"] for one in rows] for name, rows in by_layer.items()}
    charts.append(layer_chart("first", "Norm of the first position", "into each layer", first))
    shares = {name: [one["attention"] for one in rows] for name, rows in by_layer.items()}
    charts.append(layer_chart("attention", "Attention on the first position", "share", shares))
    summary = (
        f"{found['model']} on {Path(found['data']).name}: {len(runs)} LoRA runs of {found['steps']} steps of "
        f"{found['batch']} examples at learning rate {found['lr']:g}, "
        "equal but for the factor on the embedding of the first token."
    )
    tables = [("By scale", results_table(found["runs"]))]
    return overlay_page("The scale of the BOS embedding", summary, charts, tables, cautions(found["runs"]))


_QUANTITIES = (
    ("loss", "Training loss", "nats per token"),
    ("eval_loss", "Evaluation loss", "nats per token"),
    ("grad_norm", "Gradient norm", "before clipping"),
)


def run_charts(runs: Mapping[str, Sequence[Row]]) -> list[Chart]:
    """Losses and gradient norms by step, for the quantities that any run logged.

    runs: rows of trainer_log.jsonl by the name of the line. A value that is not finite is a gap.
    """
    charts = []
    for key, title, unit in _QUANTITIES:
        lines = [
            Line(name, "line", tuple((row["current_steps"], curves.number(row[key])) for row in rows if key in row))
            for name, rows in runs.items()
        ]
        if kept := tuple(line for line in lines if line.points):
            charts.append(Chart(key, title, unit, kept))
    return charts


def position_chart(key: str, title: str, values: Mapping[str, Sequence[float]], most: int) -> Chart:
    """values: by the name of the line, one per position; the first `most` are drawn, counted from 1."""
    lines = [
        Line(name, "line", tuple((place, curves.number(value)) for place, value in enumerate(row[:most], start=1)))
        for name, row in values.items()
    ]
    return Chart(key, title, "mean norm", tuple(lines), x="position")


def layer_chart(key: str, title: str, unit: str, values: Mapping[str, Sequence[float | None]]) -> Chart:
    """values: by the name of the line, one per layer."""
    lines = [
        Line(name, "line", tuple((layer, curves.number(value)) for layer, value in enumerate(row)))
        for name, row in values.items()
    ]
    return Chart(key, title, unit, tuple(lines), x="layer")


def results_table(runs: Mapping[str, Any]) -> Table:
    reference = norm_before_first_layer(next(iter(runs.values())))
    columns = (
        "scale",
        "first loss",
        "last loss",
        "gradient norm, mean",
        "largest",
        "norm of first",
        "ratio",
        "the rest",
    )
    rows = []
    for name, run in runs.items():
        losses, norms = ([row[key] for row in run["log"] if row.get(key) is not None] for key in ("loss", "grad_norm"))
        own = norm_before_first_layer(run)
        rest = run["norms"]["layers"][0]["residual_in"]["rest_norm"]
        mean = sum(norms) / len(norms) if norms else None
        values = (*ends(losses), mean, max(norms, default=None), own, own / reference if reference else None, rest)
        rows.append((name, *("–" if value is None else f"{value:.4g}" for value in values)))
    return Table(columns, tuple(rows), numeric=True)


def norm_before_first_layer(run: Mapping[str, Any]) -> float:
    return run["norms"]["layers"][0]["residual_in"]["first_norm"]


def ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    return (values[0], values[-1]) if values else (None, None)


def cautions(runs: Mapping[str, Any]) -> list[str]:
    found = []
    for name, run in runs.items():
        bad = [row["current_steps"] for row in run["log"] if row.get("loss", 0.0) is None or "skipped" in row]
        if bad:
            found.append(f"scale {name}: {len(bad)} steps were not finite or skipped, first step {bad[0]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
