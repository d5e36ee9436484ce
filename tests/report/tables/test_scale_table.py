"""A forecast for many GPUs as text: every time with the unit that shows it."""

from __future__ import annotations

import pytest

from surefoot.planning.scale import ScaleRow
from surefoot.report.tables import plan as plan_tables
from surefoot.report.tables.plan import scale_cells


def times(compute: float, traffic: float) -> tuple[str, ...]:
    row = ScaleRow(8, "ddp", 2**30, fits=True, checkpointing=False, tokens=4096, compute=compute, traffic=traffic)
    return scale_cells(row)[5:7]


def check_times() -> None:
    assert times(2.618, 0.0) == ("2.62 s", "none")
    assert times(12.5, 0.1) == ("12.50 s", "0.10 s")
    assert times(0.0123456, 0.001) == ("12.3 ms", "1 ms")
    assert times(3.25e-6, 4.51e-4) == ("3.25 µs", "451 µs")


def test_a_short_time_is_not_nothing() -> None:
    check_times()


def test_twin_in_seconds_alone_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_tables, "_seconds", lambda value: f"{value:.2f} s")
    assert times(3.25e-6, 0.0) == ("0.00 s", "0.00 s")
    with pytest.raises(AssertionError):
        check_times()
