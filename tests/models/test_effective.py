"""The effective matrices are what PEFT merges to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import zoo
from helpers.adapter_runs import CPU
from helpers.plans import adapter_plan, choice
from surefoot.models.adapters import add_adapter
from surefoot.models.facts import facts_of
from surefoot.models.load import load_model
from surefoot.models.merge import effective_weights
from surefoot.models.peft import LoraLayer

TOLERANCE = 1e-6  # fp32 sums in another order; weights are about 0.2


def adapted(folder, kind):
    model = load_model(folder, dtype=torch.float32, attention_implementation="eager", device=CPU, vocab_rows=None)
    plan = replace(adapter_plan([fact.name for fact in facts_of(folder).layer_linears]), kind=choice(kind))
    found = add_adapter(model, plan, seed=1, base=str(folder))
    torch.manual_seed(0)
    for name, parameter in found.named_parameters():
        if "lora_B" in name or "magnitude" in name:
            parameter.data += 0.1 * torch.rand_like(parameter)
    return found.eval()


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", ["phi3", "gpt2"])  # nn.Linear and Conv1D
def test_effective_matrices_are_the_merged_ones(tmp_path, name, kind):
    model = adapted(zoo.ZOO[name](tmp_path / name), kind)
    names = [path for path, module in model.get_base_model().named_modules() if isinstance(module, LoraLayer)]
    found = {path: effective_weights(model.get_base_model().get_submodule(path)) for path in names}
    before = {path: weights.before.clone() for path, weights in found.items()}  # merging writes into it
    merged = model.merge_and_unload()
    for path, weights in found.items():
        theirs = merged.get_submodule(path).weight
        assert weights.weight.shape == theirs.shape
        torch.testing.assert_close(weights.weight, theirs, rtol=0, atol=TOLERANCE)
        assert not torch.allclose(before[path], theirs, atol=1e-3)  # twin: the base's own would not pass


def test_a_plain_layer_and_a_norm_are_themselves(tmp_path):
    model = load_model(
        zoo.ZOO["opt"](tmp_path / "opt"), dtype=torch.float32, attention_implementation="eager", device=CPU
    )
    layer = model.get_submodule("model.decoder.layers.0")
    for path in ("fc1", "final_layer_norm"):
        found, module = effective_weights(layer.get_submodule(path)), layer.get_submodule(path)
        assert found.weight is module.weight
        assert found.bias is module.bias
        assert found.before is None
