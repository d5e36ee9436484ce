"""LoRA and DoRA: the published formulas, PEFT's own modules, and what is stricter than PEFT."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

from helpers.faults import raises_fault
from helpers.plans import adapter_plan, linear_names
from helpers.tiny_models import tiny_llama
from surefoot.models import adapter_targets, adapters
from surefoot.models.adapter_targets import adapted_modules, compact_targets, zero_norm_rows
from surefoot.models.adapters import add_adapter
from surefoot.models.embeddings import embedding_and_head

# fp32 against float64, or two orders of the same fp32 sums: a few ulps (6e-8) times the depth of this tiny model.
FP32_RELATIVE = 1e-5
KINDS = ["lora", "dora"]


def base_model(folder: Path, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")


def adapted(folder: Path, kind: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, **options):
    model = base_model(folder, dtype)
    return add_adapter(model, adapter_plan(linear_names(model), kind, **options), seed=seed, base="base")


def stir(model: nn.Module, seed: int = 3) -> None:
    """Move every trainable parameter off its start, where B is zero and most gradients vanish."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


IDS = torch.arange(40).reshape(2, 20) * 7 % 300


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_equal_plain_peft(folder, kind, rslora):
    ours = adapted(folder, kind, rslora=rslora)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        use_dora=kind == "dora",
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    plain = get_peft_model(base_model(folder), config)
    assert [n for n, p in ours.named_parameters() if p.requires_grad] == [
        n for n, p in plain.named_parameters() if p.requires_grad
    ]
    stir(ours)
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    expected = gradients(plain, IDS)
    for name, gradient in gradients(ours, IDS).items():
        assert relative(gradient, expected[name]) <= FP32_RELATIVE, name


def dense_weight(layer: LoraLayer, kind: str, scale: float) -> torch.Tensor:
    """The published formula in float64; DoRA's norm is a constant for the gradient (its section 4.3)."""
    w = layer.get_base_layer().weight.double()
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    moved = w + scale * b @ a
    if kind == "lora":
        return moved
    m = layer.lora_magnitude_vector["default"].weight.double()
    return (m / moved.detach().norm(dim=1)).unsqueeze(1) * moved


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_dense_formula_in_float64(folder, kind, rslora):
    model = adapted(folder, kind, rslora=rslora)
    stir(model)
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    scale = 8.0 / math.sqrt(4) if rslora else 8.0 / 4
    for scaling, same in ((scale, True), (1.1 * scale, False)):  # twin: another scale is seen
        outputs = layer(x), x.double() @ dense_weight(layer, kind, scaling).T
        assert (relative(*outputs) <= FP32_RELATIVE) == same
        parameters = [p for p in layer.parameters() if p.requires_grad]
        ours, dense = (torch.autograd.grad(output.sin().sum(), parameters) for output in outputs)
        close = [relative(g, d) <= FP32_RELATIVE for g, d in zip(ours, dense, strict=True)]
        assert all(close) if same else not any(close)


@pytest.mark.parametrize("kind", KINDS)
def test_the_draw_depends_on_the_seed_alone(folder, kind):
    torch.manual_seed(5)
    first, state = adapted(folder, kind).state_dict(), torch.get_rng_state()
    torch.manual_seed(6)
    second, other = adapted(folder, kind).state_dict(), adapted(folder, kind, seed=2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    torch.manual_seed(5)
    base_model(folder)
    assert torch.equal(torch.get_rng_state(), state)  # only loading drew anything, if it did


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_trainables_are_fp32_over_a_frozen_base_of_any_dtype(folder, kind, dtype):
    model = adapted(folder, kind, dtype=dtype, modules_to_save=("lm_head",))
    dtypes = {p.requires_grad: set() for p in model.parameters()}
    for parameter in model.parameters():
        dtypes[parameter.requires_grad].add(parameter.dtype)
    assert dtypes == {True: {torch.float32}, False: {dtype}}
    trainable = {n.split(".lora_")[0] if ".lora_" in n else n for n, p in model.named_parameters() if p.requires_grad}
    assert "base_model.model.lm_head.modules_to_save.default.weight" in trainable
    assert len(trainable) == 14 + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapted_model_starts_as_the_base_even_in_bf16(folder, kind, monkeypatch):
    """PEFT's DoRA does not: it rounds |W| to the base's dtype."""
    with torch.no_grad():
        expected = base_model(folder, torch.bfloat16)(input_ids=IDS).logits
        assert torch.equal(adapted(folder, kind, dtype=torch.bfloat16)(input_ids=IDS).logits, expected)
        monkeypatch.setattr(adapters, "_start_at_exact_norms", lambda *given: None)  # twin
        start = adapted(folder, kind, dtype=torch.bfloat16)(input_ids=IDS).logits
        assert torch.equal(start, expected) == (kind == "lora")


def test_dora_refuses_rows_of_norm_zero(folder, monkeypatch):
    model = base_model(folder)
    name = "model.layers.1.mlp.gate_proj"
    model.get_submodule(name).weight.data[[3, 9]] = 0
    assert zero_norm_rows(model, linear_names(model)) == {name: [3, 9]}
    plan = adapter_plan(linear_names(model), "dora")
    with raises_fault("SF-ADAPTER-DORA", "model.layers.1.mlp.gate_proj", 2, 3, 9):
        add_adapter(model, plan, seed=1, base="base")
    add_adapter(model, adapter_plan(linear_names(model), "lora"), seed=1, base="base").unload()
    monkeypatch.setattr(adapter_targets, "_norm_faults", lambda *_: [])  # twin: unchecked, DoRA divides by zero
    assert add_adapter(model, plan, seed=1, base="base")(input_ids=IDS).logits.isnan().any()


def test_a_target_that_the_model_lacks_is_named_with_its_neighbor(folder):
    plan = adapter_plan(("model.layers.0.self_attn.q_prj", "model.norm"))
    place, near = ("SF-ADAPTER-TARGETS", "adapter.targets"), "model.layers.0.self_attn.q_proj"
    other = (*place, "model.norm", "LlamaRMSNorm")
    with raises_fault(*place, "model.layers.0.self_attn.q_prj", remedy=[near], also=[other]):
        add_adapter(base_model(folder), plan, seed=1, base="base")


def test_exactly_the_planned_modules_are_adapted(folder):
    model = base_model(folder)
    some = tuple(name for name in linear_names(model) if "layers.1" in name and name.endswith(("q_proj", "up_proj")))
    assert adapted_modules(add_adapter(model, adapter_plan(some), seed=1, base="base")) == list(some)


def test_targets_are_written_short_where_that_means_the_same():
    names = ["a.0.q", "a.0.v", "a.1.q", "a.1.v", "lm_head"]
    assert compact_targets(names, ["a.0.q", "a.1.q"]) == ["q"]
    assert compact_targets(names, ["a.0.q", "a.1.v"]) == ["a.0.q", "a.1.v"]


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_a_tied_model_stays_tied_when_one_of_the_pair_trains(tmp_path, saved, monkeypatch):
    folder = tiny_llama(tmp_path / "tied", tied=True)

    def trained_pair() -> tuple[nn.Parameter, nn.Parameter]:
        base = adapted(folder, "lora", modules_to_save=(saved,)).get_base_model()
        return embedding_and_head(base)

    embedding, head = trained_pair()
    assert embedding is head
    assert head.requires_grad
    monkeypatch.setattr(adapters, "is_tied", lambda _: False)  # twin: PEFT alone unties them
    embedding, head = trained_pair()
    assert embedding is not head


def under_autocast(folder: Path, kind: str, base: torch.dtype, prepare=lambda model: None, **options):
    """Loss and gradients of one pass, by name."""
    model = base_model(folder, base)
    model = add_adapter(model, adapter_plan(linear_names(model), kind), seed=1, base="base", **options)
    prepare(model)
    stir(model)
    with torch.autocast("cpu", dtype=torch.float16 if base == torch.float16 else torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_casts_left_to_autocast_change_no_bit(folder, kind, base):
    plain, saved = (under_autocast(folder, kind, base, autocast=flag) for flag in (False, True))
    assert all(torch.equal(saved[name], plain[name]) for name in plain)


def without_casts(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False


def test_dora_keeps_its_casts_for_a_reason(folder):
    """The twin: without them its row norms would be bf16."""
    plain = under_autocast(folder, "dora", torch.bfloat16)
    kept = under_autocast(folder, "dora", torch.bfloat16, prepare=adapters.leave_casts_to_autocast)
    assert torch.equal(kept["loss"], plain["loss"])
    bare = under_autocast(folder, "dora", torch.bfloat16, prepare=without_casts)
    assert not torch.equal(bare["loss"], plain["loss"])


def test_a_model_made_for_autocast_fails_loudly_without_it(folder):
    model = base_model(folder, torch.bfloat16)
    model = add_adapter(model, adapter_plan(linear_names(model)), seed=1, base="base", autocast=True)
    with pytest.raises(RuntimeError, match="dtype"):
        model(input_ids=IDS)
