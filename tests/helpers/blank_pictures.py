"""Replace the plots of a run by empty pictures: same names, written and listed like the real ones, but in no time.

    with blank_pictures():
        main(["train", "run.yaml"])

tests/report/pictures/test_plots.py tests the real plots, and that one that cannot be drawn only causes a caution.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from surefoot.report.pictures import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def blank_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw", _blank)
        yield


def _blank(*curves: object) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(0.1, 0.1), dpi=10)
