"""Every rule goes there and back bit for bit, on random sizes and dtypes, and refuses what it would lose."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.faults import raises_fault
from surefoot.models.convert.rules import KINDS, Rule, apply, inverse
from surefoot.models.convert.tensors import as_bytes, held

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ODD = (float("nan"), -0.0, float("inf"), 1e-45)  # bits that arithmetic would change


def drawn(generator, shape, dtype):
    tensor = torch.randn(shape, generator=generator).to(dtype)
    flat = tensor.view(-1)
    for place, value in enumerate(ODD[: flat.numel()]):
        flat[place] = value
    return tensor


def lazy(tensors):
    return {name: held(tensor) for name, tensor in tensors.items()}


def same(first, second):
    return first.keys() == second.keys() and all(
        first[name].shape == second[name].shape
        and first[name].dtype == second[name].dtype
        and tuple(first[name].read().shape) == first[name].shape
        and torch.equal(as_bytes(first[name].read()), as_bytes(second[name].read()))
        for name in first
    )


def there_and_back(rule, tensors):
    changed = apply(rule, tensors)
    assert same(apply(inverse(rule), changed), tensors)
    assert changed.keys() != tensors.keys() or any(changed[n].shape != tensors[n].shape for n in tensors)
    return changed


def parts(sizes):
    return [f"attn.p{number}" for number in range(len(sizes))]


def model(generator, sizes, dtype, dim, fused):
    """Two layers with weights and biases; the inputs are 5 wide."""
    tensors = {"embed.weight": drawn(generator, (7, 5), dtype), "layers.0.norm.weight": drawn(generator, (5,), dtype)}
    for layer in range(2):
        modules = {"attn.qkv": sum(sizes)} if fused else dict(zip(parts(sizes), sizes, strict=True))
        for path, size in modules.items():
            shape = (size, 5) if dim == 0 else (5, size)
            tensors[f"layers.{layer}.{path}.weight"] = drawn(generator, shape, dtype)
            tensors[f"layers.{layer}.{path}.bias"] = drawn(generator, (size,), dtype)
    return lazy(tensors)


SIZES = st.lists(st.integers(1, 6), min_size=2, max_size=3)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.sampled_from(DTYPES), st.sampled_from([0, 1]), st.integers(0, 99))
def test_fused_matrices_go_there_and_back(sizes, dtype, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    given_ = {"layers": "layers", "fused": "attn.qkv", "parts": parts(sizes), "sizes": sizes, "dim": dim}
    whole = model(generator, sizes, dtype, dim, fused=True)
    split = there_and_back(Rule("split", given_), whole)
    start = sum(sizes[:-1])
    last = split[f"layers.1.{parts(sizes)[-1]}.weight"].read()
    assert torch.equal(as_bytes(last), as_bytes(whole["layers.1.attn.qkv.weight"].read().narrow(dim, start, sizes[-1])))
    there_and_back(Rule("fuse", given_), model(generator, sizes, dtype, dim, fused=False))


def test_twin_other_sizes_or_another_order_are_not_the_same():
    whole = model(torch.Generator().manual_seed(0), [4, 2], torch.float32, 0, fused=True)
    rule = Rule("split", {"layers": "layers", "fused": "attn.qkv", "parts": parts([4, 2]), "sizes": [4, 2], "dim": 0})
    swapped = Rule("fuse", {**rule.settings, "parts": parts([4, 2])[::-1], "sizes": [2, 4]})
    assert not same(apply(swapped, apply(rule, whole)), whole)
    with raises_fault("SF-CONVERT-LAYOUT", "layers.0.attn.qkv.weight"):
        apply(Rule("split", {**rule.settings, "sizes": [4, 3]}), whole)


def test_a_part_that_is_missing_or_there_twice_is_refused():
    rule = Rule("fuse", {"layers": "layers", "fused": "attn.qkv", "parts": parts([4, 2]), "sizes": [4, 2], "dim": 0})
    tensors = model(torch.Generator().manual_seed(0), [4, 2], torch.float32, 0, fused=False)
    missing = {name: tensor for name, tensor in tensors.items() if name != "layers.1.attn.p1.bias"}
    with raises_fault("SF-CONVERT-LAYOUT", "layers.1.attn.qkv.bias", "layers.1.attn.p1.bias"):
        apply(rule, missing)
    with raises_fault("SF-CONVERT-LAYOUT", "layers.0.attn.qkv.weight"):
        apply(rule, {**tensors, "layers.0.attn.qkv.weight": tensors["embed.weight"]})


@settings(max_examples=25, deadline=None)
@given(
    st.sets(st.sampled_from(["", "model", "model.layers.0", "model.layers.0.mlp", "model.layers.1"]), min_size=1),
    st.sampled_from(["_orig_mod", "base_layer", "module"]),
)
def test_pieces_go_out_and_in_again(at, piece):
    generator = torch.Generator().manual_seed(0)
    names = ["model.layers.0.mlp.up.weight", "model.layers.1.mlp.up.weight", "model.norm.weight", "lm_head.weight"]
    plain = lazy({name: drawn(generator, (2, 3), torch.float32) for name in names})
    rule = Rule("wrap", {"piece": piece, "at": sorted(at), "but": []})
    wrapped = there_and_back(rule, plain)
    assert any(piece in name.split(".") for name in wrapped)


def test_twin_a_piece_in_some_names_of_a_module_only_is_refused():
    tensors = lazy({"model._orig_mod.a.weight": torch.ones(1), "model.b.weight": torch.ones(1)})
    with raises_fault("SF-CONVERT-LAYOUT", "", "_orig_mod"):
        apply(Rule("unwrap", {"piece": "_orig_mod", "at": ["model"], "but": []}), tensors)


def test_turning_dropping_a_head_and_the_value_head():
    generator = torch.Generator().manual_seed(0)
    tensors = model(generator, [4], torch.bfloat16, 0, fused=True)
    there_and_back(Rule("transpose", {"layers": "layers", "modules": ["attn.qkv"]}), tensors)
    tied = {"head": "lm_head.weight", "embedding": "embed.weight"}
    there_and_back(Rule("copy tied head", tied), tensors)
    untied = {**tensors, "lm_head.weight": held(tensors["embed.weight"].read() * 2)}
    with raises_fault("SF-CONVERT-LAYOUT", "lm_head.weight", "embed.weight"):
        apply(Rule("drop tied head", tied), untied)
    reward = {**tensors, "v_head.weight": held(drawn(generator, (1, 5), torch.bfloat16))}
    with_bias = there_and_back(Rule("add value bias", {}), reward)
    assert with_bias["v_head.summary.bias"].shape == (1,)
    other = {**with_bias, "v_head.summary.bias": held(torch.ones(1, dtype=torch.bfloat16))}
    with raises_fault("SF-CONVERT-LAYOUT", "v_head.summary.bias"):
        apply(Rule("drop value bias", {}), other)


def test_what_buffers_held_is_gone_and_said_so():
    rule = Rule("drop buffers", {"names": ["rotary_emb.inv_freq"]})
    assert not apply(rule, lazy({"rotary_emb.inv_freq": torch.ones(2)}))
    with raises_fault("SF-CONVERT-LAYOUT", "drop buffers"):
        inverse(rule)


FRONT = "base_model.model.layers.{}.attn"


def adapter(generator, sizes, rank, dora, shared, dtype=torch.float32):
    tensors = {}
    for layer in range(2):
        a = drawn(generator, (rank, 5), dtype)
        for path, size in zip(["p0", "p1", "p2"], sizes, strict=False):
            name = f"{FRONT.format(layer)}.{path}"
            tensors[f"{name}.lora_A.weight"] = a if shared else drawn(generator, (rank, 5), dtype)
            tensors[f"{name}.lora_B.weight"] = drawn(generator, (size, rank), dtype)
            if dora:
                tensors[f"{name}.lora_magnitude_vector"] = drawn(generator, (size,), dtype)
    return lazy(tensors)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 99))
def test_adapters_of_fused_matrices_go_there_and_back(sizes, rank, dora, shared, seed):
    tensors = adapter(torch.Generator().manual_seed(seed), sizes, rank, dora, shared)
    given_ = {"fused": "attn.qkv", "parts": parts(sizes), "sizes": sizes, "stacked": not shared}
    fused = there_and_back(Rule("fuse adapter", given_), tensors)
    assert fused[f"{FRONT.format(0)}.qkv.lora_A.weight"].shape[0] == (rank if shared else rank * len(sizes))


def test_the_product_of_a_fused_adapter_is_that_of_its_parts():
    sizes, generator = [4, 2, 3], torch.Generator().manual_seed(0)
    names = [f"{FRONT.format(0)}.p{number}" for number in range(3)]
    for shared in (True, False):
        tensors = {
            name: held(torch.randn(tensor.shape, generator=generator))
            for name, tensor in adapter(generator, sizes, 2, False, False).items()
        }
        if shared:
            for name in [n for n in tensors if n.endswith("lora_A.weight")]:
                tensors[name] = tensors[f"{name.partition('.attn.')[0]}.attn.p0.lora_A.weight"]
        given_ = {"fused": "attn.qkv", "parts": parts(sizes), "sizes": sizes, "stacked": not shared}
        fused = apply(Rule("fuse adapter", given_), tensors)
        whole = f"{FRONT.format(0)}.qkv"
        product = fused[f"{whole}.lora_B.weight"].read() @ fused[f"{whole}.lora_A.weight"].read()
        for name, size, stop in zip(names, sizes, accumulate(sizes), strict=True):
            wanted = tensors[f"{name}.lora_B.weight"].read() @ tensors[f"{name}.lora_A.weight"].read()
            # The stacked product adds exact zeros, in another order of summation.
            torch.testing.assert_close(product[stop - size : stop], wanted, rtol=1e-6, atol=1e-6)


def test_what_cannot_be_fused_exactly_is_refused():
    tensors = adapter(torch.Generator().manual_seed(0), [4, 2], 2, True, shared=False)
    given_ = {"fused": "attn.qkv", "parts": parts([4, 2]), "sizes": [4, 2], "stacked": False}
    with raises_fault("SF-CONVERT-LAYOUT", "base_model.model.layers.0.attn.qkv"):
        apply(Rule("fuse adapter", given_), tensors)
    without_q = {name: tensor for name, tensor in tensors.items() if ".p0." not in name}
    with raises_fault("SF-CONVERT-LAYOUT", "base_model.model.layers.0.attn.p0"):
        apply(Rule("fuse adapter", given_), without_q)


def test_names_and_magnitudes_of_adapters_go_there_and_back():
    tensors = adapter(torch.Generator().manual_seed(0), [4, 2], 2, True, shared=False)
    tensors["base_model.model.lm_head.weight"] = held(torch.ones(3, 5))
    live = there_and_back(Rule("name adapter", {"name": "default"}), tensors)
    assert f"{FRONT.format(0)}.p0.lora_magnitude_vector.default.weight" in live
    assert "base_model.model.lm_head.modules_to_save.default.weight" in live
    old = there_and_back(Rule("old magnitude", {}), tensors)
    assert old[f"{FRONT.format(0)}.p0.weight_m_wdecomp.weight"].shape == (4, 1)
    mixed = {**live, f"{FRONT.format(9)}.p0.lora_A.weight": held(torch.ones(2, 5))}
    with raises_fault("SF-CONVERT-LAYOUT", "", "default"):
        apply(Rule("unname adapter", {"name": "default"}), mixed)


def test_every_rule_but_one_has_an_inverse_whose_inverse_it_is():
    without = [name for name, kind in KINDS.items() if kind.inverse is None]
    assert without == ["drop buffers"]
    for name, kind in KINDS.items():
        if kind.inverse is not None:
            assert KINDS[kind.inverse].inverse == name
