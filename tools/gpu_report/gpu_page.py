"""report.html of a GPU report: one self-contained page without a script, of report.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_WIDTH, _LABEL, _ROW = 760, 250, 24  # pixels of a picture, of the names in it, and of a bar
_MIB, _GIB = 2**20, 2**30
_UNKNOWN: dict[str, Any] = {"off": None, "losses": [], "attention": "", "kernels": {}}  # of a run that broke off


@dataclass(frozen=True)
class Bar:
    """share: of the longest. kind: own | peer | wrong."""

    name: str
    share: float
    text: str
    kind: str
    y: int

    @property
    def width(self) -> float:
        return round(max(1.0, self.share * (_WIDTH - _LABEL - 130)), 1)


@dataclass(frozen=True)
class Picture:
    title: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        return _ROW * len(self.bars) + 4


def write_page(path: Path, report: dict[str, Any]) -> Path:
    """report: the content of report.json. Returns the path."""
    path.write_text(page_of(report), encoding="utf-8")
    return path


def page_of(report: dict[str, Any]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    found = {name: part["found"] for name, part in report["parts"].items()}
    values = {
        "report": report,
        "identity": report["identity"],
        "rehearsal": report["identity"]["kind"] == "rehearsal",
        "machine": list(machine_rows(found["machine"])),
        "parts": report["parts"],
        "tests": {part["what"]: one for part in report["parts"].values() if "passed" in (one := part["found"] or {})},
        "probes": list(probe_rows(found["probes"])),
        "copy": (found["probes"] or {}).get("copy"),
        "cudnn": found["cudnn"],
        "runs": list(run_rows(found["runs"])),
        "paths": list(path_rows(found["runs"])),
        "memory": memory_rows(found),
        "memory_picture": memory_picture(memory_rows(found)),
        "cells": [cell_of(name, one) for name, one in found.items() if name.startswith("cell-") and one],
        "width": _WIDTH,
        "label": _LABEL,
        "mib": lambda number: f"{number / _MIB:,.0f}",
    }
    return environment.get_template("page.html").render(values)


def machine_rows(found: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if not found:
        return
    device = found["device"]
    yield "GPU", f"{device['name']}, {device['memory'] / _GIB:.1f} GiB, {(found['free'] or 0) / _GIB:.1f} free"
    yield "compute capability", ".".join(map(str, device.get("capability", ())))
    versions = (device.get(name) or "unknown" for name in ("cuda", "cudnn", "driver"))
    yield "CUDA, cuDNN, driver", ", ".join(map(str, versions))
    yield "torch is built for", ", ".join(found["arch_list"])
    for name, value in found["smi"].items():
        yield f"nvidia-smi: {name}", value
    yield "system", f"{found['system']}, {found['libc']}, {found['cpu']}, {found['threads']} threads"
    yield "versions", ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    yield "kernels and trainers", ", ".join(f"{name} {v}" for name, v in found["packages"].items()) or "none besides"
    yield "variables that matter", ", ".join(found["variables"]) or "none"


def probe_rows(found: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Of each shape: rates of products, and the forms of attention with their times, errors, and what is wrong."""
    for name, one in (found or {"shapes": {}})["shapes"].items():
        products = {dtype: f"{rate / 1e12:,.4g}" for dtype, rate in one["products"].items()}
        if one.get("tf32"):
            products["tf32"] = f"{one['tf32'] / 1e12:,.4g}"
        kinds = (("one document a row", one.get("attention", [])), ("packed rows", one.get("documents", [])))
        trials = [{**trial, "kind": kind, "worst": _worst(trial)} for kind, trials in kinds for trial in trials]
        for part in one.get("pointwise", ()):  # two rows each: the model's own, and liger-kernel's with its errors
            own = {"form": "plain", "kind": part["part"], "seconds": part["plain"], "worst": "", "failure": ""}
            its = {"form": "liger", "seconds": part["fused"], "worst": _worst(part), "failure": part["failure"]}
            trials += [own, own | its]
        yield {"name": name, "products": products, "trials": trials}


def _worst(trial: dict[str, Any]) -> str:
    errors = trial["errors"]
    return f"{max(errors.values()):.1e}" if errors else ""


def run_rows(found: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    for name, one in (found or {}).items():
        resumed = one.get("resumed")
        if resumed is None:
            verdict = one.get("fault", "not reached")
        elif not resumed:
            verdict = "equal bit for bit"
        elif not one["repeats"]:
            verdict = "not comparable: two undisturbed runs differ"
        else:
            verdict = f"DIFFERS: {resumed[0]}"
        yield {"name": name, "verdict": verdict, "right": resumed == [], **_UNKNOWN, **one}


def path_rows(found: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """What the check before step 1 saw of each fast path."""
    for name, one in (found or {}).items():
        for path, record in one.get("fast_paths", {}).items():
            differs, exact = record.get("differs", {}), record.get("fp32", {})
            why = record.get("obstacle") or record.get("fault", "")
            yield {"run": name, "path": path, "used": record["used"], "why": why, "differs": differs, "fp32": exact}


def memory_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [row for name, rows in found.items() if name.startswith("memory-") for row in rows or ()]
    return [{**row, "name": _case(row)} for row in rows]


def _case(row: dict[str, Any]) -> str:
    return f"{row['size']}, {row['length']}, {row['adapter']}, {'twice' if row['again'] == 'on' else 'once'}"


def memory_picture(rows: Sequence[dict[str, Any]]) -> Picture:
    most = max((max(row["forecast"], row["peak"]) for row in rows), default=1)
    bars = []
    for row in rows:
        for label, kind in (("forecast", "peer"), ("peak", "own")):
            text, y = f"{row[label] / _MIB:,.0f} MiB", _ROW * len(bars)
            bars.append(Bar(f"{row['name']}: {label}", row[label] / most, text, kind, y))
    return Picture("Forecast and peak of memory", bars)


def cell_of(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A comparison: its rows, sides without a figure, and a picture of tokens a second."""
    rows = found["rows"]
    most = max(row["rate"] for row in rows)
    bars = [
        Bar(row["name"], row["rate"] / most, f"{row['rate']:,.0f}", _kind(row), _ROW * number)
        for number, row in enumerate(rows)
    ]
    counted = [row["rate"] for row in rows[1:] if row["has_parity"]]
    times = f"{rows[0]['rate'] / max(counted):.2f}" if counted and rows[0]["has_parity"] else ""
    return {"name": name, **found, "times": times, "picture": Picture("Tokens a second", bars)}


def _kind(row: dict[str, Any]) -> str:
    return "wrong" if not row["has_parity"] else "own" if row["name"] == "surefoot" else "peer"
