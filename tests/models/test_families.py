"""Every family with transformers' own models: loss, adapters, kernels and answers. Tiny and random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from helpers.architectures import OPT, TINY, build
from helpers.model_layouts import model_facts, run_config
from helpers.tiers import diagonal, representatives
from surefoot.data.batching.batch import IGNORE, Example, collate
from surefoot.methods.losses.sft import sft_loss
from surefoot.models import adapters, generate
from surefoot.models.adapter_targets import zero_norm_rows
from surefoot.models.adapters import add_adapter
from surefoot.models.attention import attention_context, verify_attention
from surefoot.models.embeddings import is_tied, resize_vocabulary
from surefoot.models.generate import Decoding, decode
from surefoot.models.save import save_adapter
from surefoot.models.verify import verify_head
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.attention import mask_reason, plan_attention
from surefoot.planning.notes import Notes
from surefoot.system.hardware import preset

# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in these tiny models.
FP32_RELATIVE = 1e-5
CPU = torch.device("cpu")
CONFIGS = {**TINY, "opt projected": OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}}
WINDOW = 16  # of the families that have one


@pytest.fixture
def config(name):
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if name == "gpt2" else {"dropout": 0.0}
    return CONFIGS[name] | off


every_family = pytest.mark.parametrize("name", CONFIGS)


def model_of(config, tmp_path, kind="full", *, seed=0):
    facts = model_facts(tmp_path, config)
    torch.manual_seed(seed)
    model = build(config, device="cpu", attn_implementation="eager" if facts.without_sdpa else "sdpa").train()
    for parameter in model.parameters():  # away from zeros and ones, so that a part left out would be seen
        parameter.data += 0.05 * torch.randn_like(parameter)
    if kind == "full":
        return model
    model = add_adapter(model, adapter_of(facts, kind), seed=1, base="base").train()
    for parameter in model.parameters():
        if parameter.requires_grad:  # off the start, where B = 0 and A has no gradient
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def adapter_of(facts, kind, **request):
    notes = Notes()
    plan = plan_adapter(run_config(adapter={"kind": kind, "rank": 4} | request).adapter, facts, 0, notes)
    assert not notes.faults
    return plan


def examples(*lengths):
    rng = np.random.default_rng(0)
    return [
        Example(rng.integers(3, 70, length), np.arange(length) >= length // 3, number)
        for number, length in enumerate(lengths)
    ]


def relative(a, b):
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(("name", "kind"), diagonal(CONFIGS, ["full", "lora", "dora"]))
def test_loss_and_gradients_equal_huggingface(config, tmp_path, kind):
    """One example shorter and one longer than the windows, right padding without a mask."""
    model = model_of(config, tmp_path, kind)
    batch = collate(examples(9, 23), pad_id=0)
    ids = batch.input_ids
    labels = torch.cat((torch.full_like(ids[:, :1], IGNORE), batch.targets[:, :-1]), dim=1)
    mask = torch.tensor([[1] * 9 + [0] * (ids.shape[1] - 9), [1] * ids.shape[1]])
    expected = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss = sft_loss(model, batch).loss / batch.weight
    assert relative(loss, expected) <= FP32_RELATIVE
    ours, theirs = gradients(model, loss), gradients(model, expected)
    scale = max(gradient.norm() for gradient in theirs.values())
    for name, gradient in ours.items():  # keys' biases have a gradient of zero: compared with the largest
        assert (gradient - theirs[name]).norm() <= FP32_RELATIVE * scale, name
    wrong = gradients(model, sft_loss(model, collate(examples(9, 22), pad_id=0)).loss / batch.weight)  # twin
    assert any((wrong[name] - theirs[name]).norm() > FP32_RELATIVE * scale for name in theirs)


@every_family
def test_logits_of_chosen_positions_are_the_models_own(config, tmp_path):
    assert verify_head(model_of(config, tmp_path), CPU) <= FP32_RELATIVE


@every_family
def test_all_linear_is_what_peft_means_by_it(config, tmp_path):
    facts = model_facts(tmp_path, config)
    plan = adapter_of(facts, "dora")
    theirs = get_peft_model(build(config, device="cpu"), LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    names = [n for n, module in theirs.get_base_model().named_modules() if isinstance(module, LoraLayer)]
    assert sorted(plan.targets.value) == sorted(names)
    assert plan.trainable == sum(p.numel() for p in theirs.parameters() if p.requires_grad)


@pytest.mark.parametrize(("name", "kind"), diagonal(CONFIGS, ["lora", "dora"]))
def test_a_saved_adapter_is_the_same_to_peft(config, tmp_path, kind):
    model = model_of(config, tmp_path, kind).eval()
    save_adapter(model, tmp_path / "adapter", save_embedding=False)
    base = model_of(config, tmp_path, "full").eval()
    ids = torch.arange(40).reshape(2, 20) * 7 % 67 + 3
    plain = base(input_ids=ids).logits
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = loaded(input_ids=ids).logits
    assert relative(model(input_ids=ids).logits, expected) <= FP32_RELATIVE
    assert relative(plain, expected) > 100 * FP32_RELATIVE  # twin: the adapter does something


@every_family
def test_dora_starts_as_the_base(config, tmp_path):
    facts = model_facts(tmp_path, config)
    ids = torch.arange(20)[None] + 3
    base = model_of(config, tmp_path).eval()
    plain = base(input_ids=ids).logits
    adapted = add_adapter(base, adapter_of(facts, "dora"), seed=1, base="base").eval()
    assert relative(adapted(input_ids=ids).logits, plain) <= FP32_RELATIVE


def test_zero_norms_are_those_of_outputs_for_a_transposed_weight():
    layer = Conv1D(4, 3)
    layer.weight.data[:, 2] = 0
    model = nn.ModuleDict({"c_attn": layer})
    assert zero_norm_rows(model, ["c_attn"]) == {"c_attn": [2]}
    layer.weight.data[1] = 0  # an input that nothing reads is no zero norm
    assert zero_norm_rows(model, ["c_attn"]) == {"c_attn": [2]}


def kernels_of(facts, longest, **request):
    notes = Notes()
    return plan_attention(
        run_config(**request).attention,
        hardware=preset("cpu"),
        compute="fp32",
        head_dim=facts.head_dim,
        dropout=facts.attention_dropout,
        trials=(),
        notes=notes,
        masked=mask_reason(facts.window, longest),
        without_sdpa=facts.without_sdpa,
    )


@pytest.mark.parametrize(("name", "length"), diagonal(CONFIGS, [WINDOW - 1, WINDOW, WINDOW + 8]))
def test_the_planned_kernel_runs_below_and_above_the_window(tmp_path, name, length):
    """With the dropout that the family has by default: GPT-2's attention dropout takes flash away on a CPU."""
    facts = model_facts(tmp_path, CONFIGS[name])
    plan = kernels_of(facts, length)
    model = build(CONFIGS[name], device="cpu", attn_implementation=plan.implementation.value).train()
    batch = collate(examples(length), pad_id=0)

    def forward():
        with attention_context(plan):
            sft_loss(model, batch)

    assert verify_attention(forward, plan) == [plan.expected.value]
    assert plan.expected.value == {"gemma2": "eager", "gpt2": "math"}.get(name, "flash")


def test_gemma2_with_sdpa_is_what_transformers_refuses():
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        build(TINY["gemma2"], device="cpu", attn_implementation="sdpa")


PROMPTS = [[5, 9, 11], [7, *range(20, 45)], [8, 3]]
STEPS = 24  # beyond the window from every prompt


def answers(model, prompts):
    """Greedy tokens per prompt, and the last logits' room for doubt is checked by the caller."""
    decoding = Decoding(STEPS, stop_ids=(), pad_id=0)
    return [list(answer) for answer in zip(*decode(model, prompts, decoding), strict=True)]


@pytest.mark.parametrize("name", representatives(CONFIGS, "llama", "mistral", "gemma2", "opt", "gpt2"))
def test_answers_in_a_batch_are_those_given_one_by_one(config, tmp_path, monkeypatch):
    """Left padding, learned positions, windows and their caches; and the same without any cache."""
    model = model_of(config, tmp_path).eval()
    for parameter in model.parameters():  # first choices are clear, and answers vary
        if parameter.ndim == 2:
            parameter.data *= 4
    together = answers(model, PROMPTS)
    assert together == [answers(model, [prompt])[0] for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, together, strict=True):
        logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
    monkeypatch.setattr(generate, "positions_from_mask", lambda mask: torch.zeros_like(mask))  # twin
    assert answers(model, PROMPTS) != together


def test_the_twin_of_dora_over_conv1d(tmp_path, monkeypatch):
    """Norms by input instead of by output: the adapted model would not start as its base."""
    config = TINY["gpt2"]
    monkeypatch.setattr(adapters, "row_norms", lambda layer: torch.linalg.norm(layer.weight, dim=1))
    with pytest.raises((AssertionError, RuntimeError)):
        test_dora_starts_as_the_base(config, tmp_path)


@pytest.mark.parametrize(("part", "rows"), [("embedding", 0), ("head", 3)])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name in ("gemma2", "opt", "opt projected", "gpt2")])
def test_a_tied_pair_trains_as_one_and_counts_once(tmp_path, name, part, rows):
    facts = model_facts(tmp_path, CONFIGS[name])
    assert facts.tied
    notes = Notes()
    request = {"kind": "lora", "rank": 4, "modules_to_save": [getattr(facts, part)]}
    plan = plan_adapter(run_config(adapter=request).adapter, facts, rows, notes)
    model = build(CONFIGS[name], device="cpu")
    model_before = {key: value.clone() for key, value in model.state_dict().items()}
    resize_vocabulary(model, facts.vocab + rows)
    adapted = add_adapter(model, plan, seed=1, base="base")
    trained = {id(p): p for p in adapted.parameters() if p.requires_grad}
    assert is_tied(adapted.get_base_model())
    assert plan.trainable == sum(p.numel() for p in trained.values())
    assert not notes.faults
    for parameter in trained.values():
        parameter.data += 0.05 * torch.randn_like(parameter)
    save_adapter(adapted, tmp_path / "adapter", save_embedding=rows > 0)
    base = build(CONFIGS[name], device="cpu")
    base.load_state_dict(model_before)
    resize_vocabulary(base, facts.vocab + rows)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.arange(3, 23)[None]
    ours = adapted.eval()(input_ids=ids).logits
    assert relative(ours, loaded(input_ids=ids).logits) <= FP32_RELATIVE


@pytest.mark.parametrize(
    ("name", "target", "there"),
    [
        ("phi3", "q_proj", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")),
        ("phi3", "model.layers.0.mlp.up_proj", ("gate_up_proj",)),
        ("gpt2", "q_proj", ("c_attn", "c_proj", "c_fc")),
        ("opt", "o_proj", ("out_proj",)),
        ("opt", "down_proj", ("fc2",)),
        ("llama", "fc1", ("up_proj",)),
        ("llama", "q_prj", ("q_proj",)),
    ],
)
def test_targets_of_another_family_are_refused_with_what_exists(tmp_path, name, target, there):
    notes = Notes()
    facts = model_facts(tmp_path, CONFIGS[name])
    plan_adapter(run_config(adapter={"kind": "lora", "targets": [target]}).adapter, facts, 0, notes)
    (fault,) = notes.faults
    assert (fault.where, fault.code) == ("adapter.targets", "SF-ADAPTER-TARGETS")
    assert all(module in f"{fault.what} {fault.fix}" for module in there)
