"""The picture of a capture's residual stream: rows, order, and a first position that is seen at any length."""

from __future__ import annotations

import numpy as np
import pytest

from surefoot.report.capture import overview

LEAST = 0.05  # of the picture's width


def width_of_the_first(figure, positions: int) -> float:
    """As a share of all positions, on the screen."""
    axes = figure.axes[0]
    left, next_one, right = (axes.transData.transform((edge, 0))[0] for edge in (1, 2, positions + 1))
    return (next_one - left) / (right - left)


@pytest.mark.parametrize("positions", [1, 2, 64, 1024, 32768])
def test_the_first_position_is_seen(positions):
    norms = np.full((3, positions), 2.0)
    norms[0, 0] = 0.1
    figure = overview("run", norms, ["into 0", "into 1", "out of 1"])
    assert width_of_the_first(figure, positions) > LEAST
    (mesh,) = figure.axes[0].collections
    assert float(mesh.get_array().reshape(norms.shape)[0, 0]) == 0.1
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["into 0", "into 1", "out of 1"]
    bottom, top = figure.axes[0].get_ylim()
    assert bottom > top  # the first layer is the uppermost row


def test_twin_on_a_linear_axis_it_is_a_pixel():
    figure = overview("run", np.full((3, 1024), 2.0), ["into 0", "into 1", "out of 1"])
    figure.axes[0].set_xscale("linear")
    assert width_of_the_first(figure, 1024) < LEAST
