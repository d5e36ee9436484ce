"""Weights that GPTQModel and compressed-tensors stored are decoded to what these decode, bit for bit.

The file beside this one was written by the libraries themselves: see make_stored_integers.py.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from equality.stored_integers import CASES, INPUTS, OUTPUTS
from helpers.faults import raises_fault
from surefoot.families.stored_forms import stored_form
from surefoot.models.convert import decoded_integers as module
from surefoot.models.convert.decoded import decoded
from surefoot.models.convert.tensors import held

FILE = Path(__file__).with_name("stored_integers.safetensors")


@pytest.fixture(scope="module")
def layers():
    found = {name: {} for name in CASES}
    for name, tensor in load_file(FILE).items():
        case, _, kind = name.partition(".")
        found[case][kind] = tensor
    return found


def plain(case, parts):
    """Of a layer beside a norm and a bias, which stay as they are."""
    own = {f"a.{kind}": held(tensor) for kind, tensor in parts.items() if kind != "decoded"}
    others = {"a.bias": held(torch.ones(OUTPUTS)), "norm.weight": held(torch.ones(INPUTS))}
    found = decoded(own | others, CASES[case])
    assert found.keys() == {"a.weight", *others}
    assert (found["a.weight"].shape, found["a.weight"].dtype) == ((OUTPUTS, INPUTS), "F32")
    return found["a.weight"].read()


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_what_its_library_decodes(layers, case):
    """The library rounds the product to the type of its factors; here it is exact until the base's type rounds it."""
    theirs = layers[case]["decoded"]
    assert theirs.dtype in (torch.float16, torch.bfloat16)
    assert torch.equal(plain(case, layers[case]).to(theirs.dtype), theirs)
    assert stored_form(CASES[case])


@pytest.mark.parametrize(
    "case", ["gptq-4-zeros", "gptq-4-act-order", "awq", "packed-4-zeros", "int8-zeros", "fp8-blocks"]
)
@pytest.mark.parametrize("damage", ["_AWQ_COLUMNS", "_columns", "zeros"])
def test_each_part_of_the_rule_counts(layers, monkeypatch, case, damage):
    """The twin: an order of half bytes, the groups of columns, the zeros."""
    counts = {
        "_AWQ_COLUMNS": {"awq"},
        "_columns": CASES.keys() - {"int8-zeros"},
        "zeros": CASES.keys() - {"fp8-blocks"},
    }
    parts = dict(layers[case])
    if damage == "zeros":
        parts |= {kind: parts[kind] + 1 for kind in ("qzeros", "weight_zero_point") if kind in parts}
    else:
        other = tuple(range(8)) if damage == "_AWQ_COLUMNS" else lambda *_: torch.zeros(INPUTS, dtype=torch.long)
        monkeypatch.setattr(module, damage, other)
    theirs = parts["decoded"]
    assert torch.equal(plain(case, parts).to(theirs.dtype), theirs) == (case not in counts[damage])


@pytest.mark.parametrize(
    ("case", "lost"),
    [("gptq-4", "scales"), ("awq", "qzeros"), ("packed-4", "weight_scale"), ("packed-4", "weight_shape")],
)
def test_numbers_without_what_belongs_to_them_are_refused(layers, case, lost):
    parts = {kind: tensor for kind, tensor in layers[case].items() if kind != lost}
    with raises_fault("SF-CONVERT-LAYOUT", "a.weight"):
        plain(case, parts)


@pytest.mark.parametrize("case", ["gptq-4", "awq", "packed-4-zeros", "int8-zeros"])
def test_shapes_that_do_not_belong_together_are_refused(layers, case):
    factors = next(kind for kind in layers[case] if kind.endswith(("qzeros", "zero_point")))
    numbers = next(kind for kind in ("qweight", "weight_packed", "weight") if kind in layers[case])
    with raises_fault("SF-CONVERT-LAYOUT", f"a.{numbers}"):
        plain(case, layers[case] | {factors: layers[case][factors][:1, :1]})


def test_groups_that_have_no_factors_are_refused(layers):
    with raises_fault("SF-CONVERT-LAYOUT", "a"):
        plain("gptq-4-act-order", layers["gptq-4-act-order"] | {"g_idx": torch.full((INPUTS,), 4)})


def test_outputs_that_do_not_fill_the_last_word_of_zeros(layers):
    """As of an output head that GPTQModel rounds, with a vocabulary that four does not divide."""
    odd = OUTPUTS - 2
    parts = layers["gptq-8"] | {kind: layers["gptq-8"][kind][:, :odd] for kind in ("qweight", "scales")}
    theirs = parts.pop("decoded")
    ours = decoded({f"a.{kind}": held(tensor) for kind, tensor in parts.items()}, CASES["gptq-8"])
    assert torch.equal(ours["a.weight"].read().to(theirs.dtype), theirs[:odd])
