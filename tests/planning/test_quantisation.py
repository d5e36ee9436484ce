"""nf4: what it weighs, against bitsandbytes itself, and what it refuses."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.model_layouts import LLAMA31_8B, model_facts, run_config
from helpers.plans import adapter_plan, attention_plan, precision_plan
from surefoot.config.contradictions import contradictions
from surefoot.families import find
from surefoot.models.precision import is_quantised, quantise
from surefoot.planning import memory
from surefoot.planning.notes import Notes
from surefoot.planning.quantisation import check_packed_base
from surefoot.planning.workload import Workload

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
# Tables of a few hundred bytes per layer are left out of the forecast.
TABLES = 1e-3


def frozen_bytes(folder, base):
    model = model_facts(folder, LLAMA31_8B | SIZES)
    adapter, precision = adapter_plan(["q_proj"]), precision_plan("bf16", base)
    return memory._frozen_bytes(Workload(model, precision, attention_plan(), adapter, 0, model.parameters, 0))


def test_a_packed_base_takes_what_bitsandbytes_holds(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    quantise(model, compute=torch.bfloat16, device=torch.device("cpu"))
    held = sum(parameter.nbytes for parameter in model.parameters())
    for name in [name for name, module in model.named_modules() if is_quantised(module)]:
        state = model.get_submodule(name).weight.quant_state
        held += state.absmax.nbytes + state.state2.absmax.nbytes
    dequantised = 128 * 352 * 2  # the largest matrix, for its product
    assert frozen_bytes(tmp_path, "nf4") == pytest.approx(held + dequantised, rel=TABLES)
    assert frozen_bytes(tmp_path, "nf4") < 0.6 * frozen_bytes(tmp_path, "bf16")  # twin: not the size of 16 bits


def faults(model, *saved):
    notes = Notes()
    check_packed_base(model, adapter_plan(["q_proj"], modules_to_save=saved), notes)
    return [(fault.where, fault.what) for fault in notes.faults]


def test_transposed_layers_are_refused(tmp_path):
    llama = model_facts(tmp_path, LLAMA31_8B)
    assert faults(llama) == []
    ((where, what),) = faults(dataclasses.replace(llama, family=find("gpt2"), model_type="gpt2"))
    assert where == "precision.base"
    assert "gpt2 hold their weights transposed" in what


def test_packed_layers_cannot_train_in_full(tmp_path):
    llama = model_facts(tmp_path, LLAMA31_8B)
    assert faults(llama, "lm_head", "norm") == []
    ((where, what),) = faults(llama, "up_proj")
    assert where == "adapter.modules_to_save"
    assert "up_proj would train in full" in what


def test_without_an_adapter_nothing_could_train():
    (problem,) = contradictions(run_config(adapter=None, precision={"base": "nf4"}))
    assert problem.key == "precision.base"
    assert contradictions(run_config(precision={"base": "nf4"})) == []


def test_noise_and_compile_exclude_each_other():
    (problem,) = contradictions(run_config(optim={"neftune_alpha": 5.0}, compile="default"))
    assert problem.key == "optim.neftune_alpha"
    assert contradictions(run_config(optim={"neftune_alpha": 5.0})) == []
