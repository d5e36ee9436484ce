"""Merged weights are PEFT's own, bit for bit, and the formula's; a tied head is lost by no way of training it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from helpers import zoo
from helpers.faults import raises_fault
from helpers.plans import adapter_plan
from helpers.tiers import diagonal
from surefoot.models import merge
from surefoot.models.adapters import ADAPTER, add_adapter
from surefoot.models.embeddings import embedding_and_head, is_tied
from surefoot.models.load import load_model
from surefoot.models.merge import cast_weights, effective_weights, merge_adapter, tensor_digests
from surefoot.models.peft import LoraLayer, PeftModel
from surefoot.models.save import save_full
from surefoot.models.verify import compare_logits, logits_of, rounding_noise
from surefoot.runs.export.certificate import MERGED_LIMIT, NOISE_LIMIT

CPU = torch.device("cpu")
FORMULA = 2e-6  # of the largest weight: units in the last place of fp32, after products of rank 4


def texts(seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (24,), generator=generator).tolist() for _ in range(3)]


def base_model(folder: Path):
    eager = folder.name == "gemma2"
    return load_model(folder, dtype=torch.float32, attention_implementation="eager" if eager else "sdpa", device=CPU)


def trained(folder: Path, kind: str, *, modules_to_save: tuple[str, ...] = (), rslora: bool = False) -> PeftModel:
    """An adapter on all linear layers that has moved everything it trains."""
    model = base_model(folder)
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    plan = adapter_plan(linear, kind, modules_to_save=modules_to_save, rslora=rslora)
    adapted = add_adapter(model, plan, seed=1, base="base").eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.1 * parameter.abs().mean().clamp(min=0.5) * noise
    return adapted


def by_hand(module: LoraLayer) -> torch.Tensor:
    """LoRA and DoRA from their equations, in float64, as [outputs, inputs] whatever the layer holds."""
    base = module.get_base_layer()
    weight = base.weight.double().T if isinstance(base, Conv1D) else base.weight.double()
    product = module.lora_B[ADAPTER].weight.double() @ module.lora_A[ADAPTER].weight.double()
    changed = weight + module.scaling[ADAPTER] * product
    if ADAPTER in module.lora_magnitude_vector:
        magnitude = module.lora_magnitude_vector[ADAPTER].weight.double()
        changed = magnitude[:, None] * changed / changed.pow(2).sum(dim=1, keepdim=True).sqrt()
    return changed.T if isinstance(base, Conv1D) else changed


@pytest.mark.parametrize(("family", "kind"), diagonal(zoo.ZOO, ["lora", "dora"]))
def test_merged_is_what_peft_merges_and_what_the_equation_says(zoo_model, family, kind):
    adapted = trained(zoo_model(family), kind, rslora=family == "qwen2")
    wanted = logits_of(adapted, texts())
    hand = {n: by_hand(m) for n, m in adapted.get_base_model().named_modules() if isinstance(m, LoraLayer)}
    reference = copy.deepcopy(adapted).merge_and_unload()
    merged = merge_adapter(adapted)
    assert set(merged.layers) == set(hand)
    assert tensor_digests(merged.model) == tensor_digests(reference)
    for name, weight in hand.items():
        difference = (merged.model.get_submodule(name).weight.double() - weight).abs().max()
        assert difference <= FORMULA * weight.abs().max()
    assert not [name for name, _ in merged.model.named_parameters() if "lora" in name or "base_layer" in name]
    assert compare_logits(wanted, logits_of(merged.model, texts())).share <= MERGED_LIMIT


def test_a_plain_layer_and_a_norm_are_themselves(zoo_model):
    layer = base_model(zoo_model("opt")).get_submodule("model.decoder.layers.0")
    for path in ("fc1", "final_layer_norm"):
        found, module = effective_weights(layer.get_submodule(path)), layer.get_submodule(path)
        assert found.weight is module.weight
        assert found.bias is module.bias
        assert found.before is None


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_twin_a_wrong_scale_is_noticed(zoo_model, kind):
    adapted = trained(zoo_model("llama3"), kind)
    wanted = logits_of(adapted, texts())
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            module.scaling[ADAPTER] *= 1.05
    assert compare_logits(wanted, logits_of(merge_adapter(adapted).model, texts())).share > 10 * MERGED_LIMIT


def test_twin_swapped_magnitudes_are_noticed(zoo_model):
    adapted = trained(zoo_model("llama3"), "dora")
    wanted = logits_of(adapted, texts())
    module = next(m for m in adapted.modules() if isinstance(m, LoraLayer))
    magnitude = module.lora_magnitude_vector[ADAPTER].weight
    magnitude.data[[0, 1]] = magnitude.data[[1, 0]]
    assert compare_logits(wanted, logits_of(merge_adapter(adapted).model, texts())).share > MERGED_LIMIT


def test_a_trained_pair_stays_tied(zoo_model):
    adapted = trained(zoo_model("qwen2"), "lora", modules_to_save=("lm_head",))
    wanted = logits_of(adapted, texts())
    merged = merge_adapter(adapted)
    assert merged.replaced
    assert not merged.untied
    assert is_tied(merged.model)
    assert compare_logits(wanted, logits_of(merged.model, texts())).share <= MERGED_LIMIT


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["head trained in full", "head adapted", "embedding adapted"],
)
def test_what_is_tied_no_longer_is_untied_in_words_too(zoo_model, tmp_path, settings):
    """Adapters of others: PEFT trains a head of its own there, and a config that ties it would lose it."""
    adapted = get_peft_model(base_model(zoo_model("qwen2")), LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, **settings))
    generator = torch.Generator().manual_seed(2)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    wanted = logits_of(adapted.eval(), texts())
    merged = merge_adapter(adapted)
    assert merged.untied
    assert merged.model.config.tie_word_embeddings is False
    embedding, head = embedding_and_head(merged.model)
    assert not torch.equal(embedding, head)
    save_full(merged.model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert compare_logits(wanted, logits_of(again, texts())).share <= MERGED_LIMIT
    assert tensor_digests(again) == tensor_digests(merged.model)


def test_biases_of_an_adapter_are_merged(zoo_model):
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["q_proj"], lora_bias=True)
    adapted = get_peft_model(base_model(zoo_model("qwen2")), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.3
    wanted = logits_of(adapted.eval(), texts())
    assert compare_logits(wanted, logits_of(merge_adapter(adapted).model, texts())).share <= MERGED_LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_measured_in_what_the_dtype_may_do(dtype):
    """Every size that fp16 has, with ties and subnormal numbers; a whole unit in the last place counts 2."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4000, generator=generator) * 2.0 ** torch.randint(-26, 15, (4000,), generator=generator)
    kind = torch.finfo(dtype)
    ties = torch.tensor([1 + kind.eps / 2, kind.tiny * (1 + kind.eps / 2), 0.0, -1.0])
    values = torch.cat([values, ties])
    assert 0.95 < merge._rounding(values, values.to(dtype)) <= 1
    truncated = (values.view(torch.int32) & (-1 << {torch.bfloat16: 16, torch.float16: 13}[dtype])).view(torch.float32)
    assert merge._rounding(values, truncated.to(dtype)) > 1.5
    assert merge._rounding(values, torch.full_like(values, float("nan")).to(dtype)) == float("inf")


@pytest.mark.parametrize(("family", "kind"), diagonal(zoo.ZOO, ["lora", "dora"]))
def test_what_merging_changes_is_of_the_size_of_one_rounding(zoo_model, family, kind):
    """The measure behind NOISE_LIMIT, which leaves a factor of nearly four."""
    base = base_model(zoo_model(family))
    plain = logits_of(base, texts())
    noise = rounding_noise(base, texts(), plain)
    assert 0 < noise < MERGED_LIMIT / NOISE_LIMIT
    adapted = trained(zoo_model(family), kind)
    wanted = logits_of(adapted, texts())
    found = compare_logits(wanted, logits_of(merge_adapter(adapted).model, texts())).share
    assert found < NOISE_LIMIT / 2 * noise
    assert compare_logits(plain, wanted).share > 1000 * NOISE_LIMIT * noise  # twin: no adapter at all
    assert torch.equal(plain[0], logits_of(base, texts())[0])  # the measurement leaves nothing behind


def test_a_value_that_does_not_fit_is_named(zoo_model):
    model = base_model(zoo_model("llama3"))
    model.lm_head.weight.data[0, 0] = 1e6
    with raises_fault("SF-MODEL-NUMBERS", "lm_head.weight", "float16", "65504"):
        cast_weights(model, torch.float16)
    cast_weights(base_model(zoo_model("llama3")), torch.float16)
