"""The table of a comparison fits a terminal: the row names the tensor, the last cell its layer."""

import io
from dataclasses import replace

from surefoot.evaluate.capture_comparison import TensorDifference
from surefoot.report.capture import difference_table
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
    assert found[1:] == ["qkv_proj input 3 0 0.2 – – 0.3 in layer 7", "norm input 1 0 0.4 – – 0.4"]


def test_twin_another_layer_is_another_line():
    assert lines(difference(0, 0.3), difference(7, 0.1))[1].endswith("0.3 in layer 0")


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
