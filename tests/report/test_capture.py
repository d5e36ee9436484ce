"""Captures on the screen: the table of a comparison fits a terminal, and the first position is seen at any length."""

import io
from dataclasses import replace

import numpy as np
import pytest

from surefoot.evaluate.capture_comparison import TensorDifference
from surefoot.report.capture import difference_table, overview
from surefoot.report.console import Console


def difference(layer, relative):
    place = "model.norm" if layer is None else f"model.layers.{layer}.self_attn.qkv_proj"
    return TensorDifference(f"{place}.input", layer, "input", None, relative, None, None, 0.5, equal=not relative)


def lines(*differences):
    screen = io.StringIO()
    Console(screen).show(difference_table(differences))
    return [" ".join(line.split()) for line in screen.getvalue().splitlines()]


def test_the_largest_difference_is_told_with_its_layer():
    found = lines(difference(0, 0.1), difference(7, 0.3), difference(8, 0.2), difference(None, 0.4))
    first, second = (line.split() for line in found[1:])
    assert (first[:8], first[-1]) == (["qkv_proj", "input", "3", "0", "0.2", "–", "–", "0.3"], "7")
    assert second == ["norm", "input", "1", "0", "0.4", "–", "–", "0.4"]


def test_twin_another_layer_is_another_line():
    assert lines(difference(0, 0.3), difference(7, 0.1))[1].split()[7::3] == ["0.3", "0"]


def test_long_names_are_cut_in_the_middle_and_never_wrapped():
    names = ["pre_feedforward_layernorm", "post_feedforward_layernorm", "qkv_proj"]
    rows = [replace(difference(3, 0.25), name=f"model.layers.3.{one}.weight", kind="weight") for one in names]
    screen = io.StringIO()
    Console(screen, width=80).show(difference_table(rows))
    shown = [line.split("  ")[0] for line in screen.getvalue().splitlines() if "weight" in line]
    assert len({*shown}) == len(shown), "each is told apart from the others"
    assert len(shown) == len(names)
    assert all(line.endswith("weight") for line in shown), screen.getvalue()


def test_equal_tensors_have_no_largest():
    assert lines(difference(3, 0.0))[1] == "qkv_proj input 1 1 0 – – –"


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
