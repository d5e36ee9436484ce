"""Autocast and TF32 as planned. QLoRA in 4 and 8 bits: what is packed, the gradients, the same bits on every load."""

from __future__ import annotations

import copy

import bitsandbytes
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from helpers.faults import raises_fault
from helpers.plans import adapter_plan, linear_names, precision_plan, run_plan
from surefoot.models import precision as module
from surefoot.models.adapters import add_adapter
from surefoot.models.load import load_model
from surefoot.models.precision import CODES, TORCH_DTYPE, autocast, is_quantized, plain_weight, quantize, set_tf32
from surefoot.models.save import save_adapter
from surefoot.models.verify import verify_model


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_matrix_products_run_in_the_compute_dtype(compute):
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with autocast(precision_plan(compute), torch.device("cpu")):
        assert layer(x).dtype == TORCH_DTYPE[compute]
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize("cached", [True, False])
def test_casts_of_weights_are_cached_or_not(cached):
    with autocast(precision_plan("bf16"), torch.device("cpu"), cached=cached):
        assert torch.is_autocast_cache_enabled() == cached


@pytest.mark.parametrize(("allowed", "name"), [(True, "tf32"), (False, "ieee")])
def test_tf32_is_set_both_ways(allowed, name):
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.fp32_precision
    try:
        set_tf32(precision_plan(tf32=allowed))
        assert torch.backends.cuda.matmul.fp32_precision == name
        assert torch.backends.cudnn.fp32_precision == name
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.fp32_precision = before


CPU = torch.device("cpu")
# Gradients of the adapters against a float64 model that holds the dequantized weights, relative to the largest.
FP32_GRADIENTS = 2e-5
# The same with bf16 products, which keep 8 bits: a few times 2**-8 through two layers.
BF16_GRADIENTS = 0.06
# Two fp32 models that differ in the order of sums.
FP32_LOGITS = 1e-5
IDS = torch.randint(0, 300, (3, 24), generator=torch.Generator().manual_seed(0))

both = pytest.mark.parametrize("to", ["nf4", "int8"])


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model(hidden=64)


def packed_base(folder, compute=torch.float32, to="nf4"):
    model = load_model(folder, dtype=compute, attention_implementation="sdpa", device=CPU)
    quantize(model, to, compute=compute, device=CPU)
    return model


def adapted(model, kind="lora"):
    """With an adapter whose B is not zero, so that A has gradients too."""
    plan = adapter_plan(linear_names(model), kind)
    found = add_adapter(model, plan, seed=1, base="base", autocast=model.dtype != torch.float32)
    draw = torch.Generator().manual_seed(2)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=draw))
    return found


def unpacked(model):
    """The same model in float64, every packed weight replaced by what it stands for."""
    copied = copy.deepcopy(model)
    copied.is_loaded_in_4bit = copied.is_loaded_in_8bit = False
    for name, layer in list(copied.named_modules()):
        if is_quantized(layer):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight = nn.Parameter(plain_weight(layer).double(), requires_grad=False)
            copied.set_submodule(name, plain)
    return copied.double()


def gradients(model, cast=None):
    model.zero_grad()
    with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
        logits = model(input_ids=IDS).logits
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).to(torch.float64), IDS[:, 1:].flatten()).backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in wanted)


def reference(folder, kind, compute, to="nf4"):
    """float64, dequantized weights, the adapter of `adapted`."""
    plain = unpacked(packed_base(folder, compute, to))
    model = adapted(plain, kind)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


@both
def test_the_decoders_linear_layers_are_packed_and_nothing_else(folder, to):
    model = packed_base(folder, to=to)
    assert {name for name, module in model.named_modules() if is_quantized(module)} == set(linear_names(model))
    assert {name for name, p in model.named_parameters() if p.dtype == CODES[to]} == {
        f"{name}.weight" for name in linear_names(model)
    }
    weight = model.model.layers[0].mlp.gate_proj.weight
    assert weight.numel() == 64 * 128 / (2 if to == "nf4" else 1)
    if to == "nf4":
        assert weight.quant_state.nested
        assert weight.quant_state.quant_type == "nf4"


def transformers_own(folder, to, compute=torch.float32):
    in_4_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": compute}
    asked = {"load_in_8bit": True} if to == "int8" else {"load_in_4bit": True} | in_4_bits
    config = BitsAndBytesConfig(**asked)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=compute)


@both
def test_the_values_are_those_of_transformers_own_loading(folder, to):
    theirs, ours = transformers_own(folder, to), packed_base(folder, to=to)
    for name in linear_names(ours):
        assert torch.equal(plain_weight(ours.get_submodule(name)), plain_weight(theirs.get_submodule(name)))


@both
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_step_begins_as_transformers_and_peft_begin_it(folder, to, kind, compute):
    """The same adapter over what transformers loads, on the same batch: the gradients of every A, B and m."""
    wanted = gradients(adapted(transformers_own(folder, to, compute), kind).train(), cast(compute))
    found = gradients(adapted(packed_base(folder, compute, to), kind).train(), cast(compute))
    assert error(found, wanted) < FP32_GRADIENTS


def test_every_load_gives_the_same_bits(folder):
    first, second = packed_base(folder), packed_base(folder)
    for name in linear_names(first):
        a, b = first.get_submodule(name).weight, second.get_submodule(name).weight
        assert torch.equal(a.data, b.data)
        assert torch.equal(a.quant_state.absmax, b.quant_state.absmax)


@both
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_are_those_of_the_dequantized_model(folder, kind, to):
    wanted = gradients(reference(folder, kind, torch.float32, to))
    assert error(gradients(adapted(packed_base(folder, to=to), kind)), wanted) < FP32_GRADIENTS


@both
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_gradients_in_bf16(folder, kind, to):
    wanted = gradients(reference(folder, kind, torch.bfloat16, to))
    found = gradients(adapted(packed_base(folder, torch.bfloat16, to), kind), cast=torch.bfloat16)
    assert error(found, wanted) < BF16_GRADIENTS


@pytest.mark.parametrize(("to", "least"), [("nf4", BF16_GRADIENTS), ("int8", 50 * FP32_GRADIENTS)])
def test_twin_the_unquantized_model_has_other_gradients(folder, to, least):
    wanted = gradients(reference(folder, "lora", torch.float32, to))
    full = load_model(folder, dtype=torch.float32, attention_implementation="sdpa", device=CPU)
    assert error(gradients(adapted(full)), wanted) > least


@both
def test_dora_starts_at_the_norms_of_the_dequantized_rows(folder, to):
    model = packed_base(folder, torch.bfloat16, to)
    norms = torch.linalg.norm(plain_weight(model.model.layers[0].self_attn.q_proj).float(), dim=1)
    found = add_adapter(model, adapter_plan(linear_names(model), "dora"), seed=1, base="base")
    layer = found.get_base_model().model.layers[0].self_attn.q_proj
    assert torch.equal(layer.lora_magnitude_vector["default"].weight.data, norms)


@both
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_training_after_an_evaluation_is_training_without_one(folder, compute, to):
    """bitsandbytes repacks weights for generation on CPUs with AVX512-BF16, in a form that has no gradient."""
    before = gradients(adapted(packed_base(folder, compute, to)), cast(compute))
    model = evaluated(adapted(packed_base(folder, compute, to)), compute)
    assert error(gradients(model.train(), cast(compute)), before) == 0


@pytest.mark.skipif(not bitsandbytes.functional.has_avx512bf16(), reason="only CPUs with AVX512-BF16 repack")
def test_twin_with_the_repacking_it_is_not(folder):
    model = adapted(packed_base(folder, torch.bfloat16))
    for layer in model.modules():
        if is_quantized(layer):
            layer.support_avx512bf16_for_cpu = True
    wanted = gradients(adapted(packed_base(folder, torch.bfloat16)), torch.bfloat16)
    assert error(gradients(evaluated(model, torch.bfloat16).train(), torch.bfloat16), wanted) > BF16_GRADIENTS


def cast(compute):
    return None if compute == torch.float32 else compute


def evaluated(model, compute):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=compute == torch.bfloat16):
        model.eval()(input_ids=IDS)
    return model


@both
def test_the_adapter_is_read_by_peft_over_both_bases(folder, tmp_path, to):
    model = adapted(packed_base(folder, to=to)).eval()
    save_adapter(model, tmp_path, save_embedding=False)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        over_packed = PeftModel.from_pretrained(packed_base(folder, to=to), tmp_path)(input_ids=IDS).logits
        full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        over_full = PeftModel.from_pretrained(full, tmp_path)(input_ids=IDS).logits
    assert (over_packed - wanted).abs().max() < FP32_LOGITS
    assert FP32_LOGITS < (over_full - wanted).abs().max() < wanted.abs().max()  # another base, the same adapter


class TestVerification:
    def plan(self, model, base="nf4", **changes):
        adapter = adapter_plan(linear_names(packed_base(changes.pop("folder"))))
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return run_plan(
            trainable=trainable, parameters=0, adapter=adapter, precision=precision_plan("fp32", base), **changes
        )

    @both
    def test_packed_bytes_are_what_was_planned(self, folder, to):
        model = adapted(packed_base(folder, to=to))
        found = verify_model(model, self.plan(model, to, folder=folder))
        assert found["frozen_dtypes"] == sorted(["float32", str(CODES[to]).removeprefix("torch.")])
        assert found["not_packed"] == []
        with raises_fault("SF-PLAN-BROKEN", "plan: frozen_dtypes"):
            verify_model(model, self.plan(model, {"nf4": "int8", "int8": "nf4"}[to], folder=folder))

    def test_a_base_that_was_not_packed_is_noticed(self, folder):
        model = adapted(load_model(folder, dtype=torch.float32, attention_implementation="sdpa", device=CPU))
        with raises_fault("SF-PLAN-BROKEN", "plan: frozen_dtypes", also=[("SF-PLAN-BROKEN", "plan: not_packed")]):
            verify_model(model, self.plan(model, folder=folder))

    def test_one_layer_that_was_not_packed_is_noticed(self, folder, monkeypatch):
        packed = module._nf4
        monkeypatch.setattr(module, "_nf4", lambda one, *rest: one if one.out_features == 128 else packed(one, *rest))
        model = adapted(packed_base(folder))
        monkeypatch.undo()
        with raises_fault("SF-PLAN-BROKEN", "plan: not_packed"):
            verify_model(model, self.plan(model, folder=folder))
