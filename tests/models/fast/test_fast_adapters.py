"""Adapted layers by surefoot's own arithmetic against PEFT's forward, over families, types and ways of use."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import zoo
from helpers.tiers import diagonal, representatives
from helpers.zoo_adapters import a_batch, adapted, base_model, saved
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import leave_casts_to_autocast
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.fast import adapters as fast_adapters
from surefoot.models.fast.adapters import install
from surefoot.models.forward import causal_model, logits_at
from surefoot.models.peft import PeftModel
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.training.optimizer import OptimizerSettings, make_optimizers

KINDS = ("lora", "dora")
EVERYWHERE = torch.arange(18)
EXACT = 1e-10  # float64 in another order of sums; 2e-15 seen
FP32 = 2e-5  # of a gradient's norm; 2e-6 seen
NO_WORSE = 1.15  # mean error against PEFT's; 0.95 to 1.07 seen, where the seeds of one arm spread by 0.1


@pytest.fixture
def passes(monkeypatch):
    """How many layers each call of the kernel computed."""
    seen = []
    plain = fast_adapters.adapted

    def watched(layers, *others):
        seen.append(len(layers.projections))
        return plain(layers, *others)

    monkeypatch.setattr(fast_adapters, "adapted", watched)
    return seen


def learner(folder, kind="lora", seed=1, *, dropout=0.0, **options):
    """In training mode, with no dropout but the adapter's."""
    model = adapted(folder, kind, seed, dropout=dropout, **options).train()
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
            module.p = 0.0
    return model


def gradients(model, context=nullcontext, batch=None):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)  # of the masks
    with context():
        loss = sft_loss(model, batch or a_batch()).loss
    loss.backward()
    return {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


def bf16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def difference(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - one).norm() / one.norm().clamp(min=1e-30)) for name, one in wanted.items())


@pytest.mark.parametrize(("family", "kind"), diagonal(zoo.ZOO, KINDS))
def test_every_family_learns_the_same(zoo_model, passes, family, kind):
    model = learner(zoo_model(family), kind, dropout=0.2)
    exact = copy.deepcopy(model).double()
    for one, limit in ((exact, EXACT), (model, FP32)):
        plain = gradients(one)
        assert not passes
        undo = install(one)
        passes.clear()
        assert difference(gradients(one), plain) < limit
        assert passes
        passes.clear()
        undo()
        assert difference(gradients(one), plain) == 0
        assert not passes


TOGETHER = [("llama3", "lora"), ("phi3", "dora"), ("gpt2", "lora"), ("opt", "dora")]  # each other inputs in common


@pytest.mark.parametrize(("family", "kind"), representatives(product(zoo.ZOO, KINDS), *TOGETHER))
def test_without_dropout_layers_with_one_input_are_computed_together(zoo_model, passes, family, kind):
    model = learner(zoo_model(family), kind).double()
    plain = gradients(model)
    install(model)
    passes.clear()
    assert difference(gradients(model), plain) < EXACT
    layers = len(causal_model(model).get_decoder().layers if family != "gpt2" else causal_model(model).transformer.h)
    wanted = {"opt": [3, 1, 1, 1], "gpt2": [1, 1, 1, 1], "phi3": [1, 1, 1, 1]}.get(family, [3, 1, 2, 1])
    assert passes == wanted * layers


def test_twin_another_scale_is_seen(zoo_model):
    model = learner(zoo_model("llama3")).double()
    plain = gradients(model)
    install(model)
    layer = next(module for module in model.modules() if isinstance(module, fast_adapters.LoraLinear))
    layer.scaling["default"] *= 1.001
    assert difference(gradients(model), plain) > 1e4 * EXACT


@pytest.mark.parametrize("options", [{"rslora": True}, {"modules_to_save": ("lm_head",)}, {"targets": "q_proj"}])
@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_adapt(zoo_model, kind, options):
    model = learner(zoo_model("llama3"), kind, **options).double()
    plain = gradients(model)
    install(model)
    assert difference(gradients(model), plain) < EXACT


def narrow(model):
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_near_to_float64_as_the_plain_path(zoo_model, kind):
    errors = {"plain": 0.0, "fast": 0.0}
    for family in ("llama3", "qwen2", "gpt2"):
        for seed in range(4):
            model = narrow(learner(zoo_model(family), kind, seed))
            if kind == "lora":
                leave_casts_to_autocast(model)
            exact = gradients(copy.deepcopy(model).double())
            size = sum(float(one.norm() ** 2) for one in exact.values()) ** 0.5
            for arm in errors:
                undo = install(model) if arm == "fast" else lambda: None
                found = gradients(model, bf16)
                undo()
                errors[arm] += sum(float((found[name] - one).norm() ** 2) for name, one in exact.items()) ** 0.5 / size
    assert errors["fast"] < NO_WORSE * errors["plain"]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_in_bf16_are_those_of_the_plain_path(zoo_model, kind):
    """With others the gradients would have little in common."""
    model = narrow(learner(zoo_model("llama3"), kind, dropout=0.5))
    plain = gradients(model, bf16)
    install(model)
    assert difference(gradients(model, bf16), plain) < 0.15
    torch.manual_seed(6)
    with bf16():
        loss = sft_loss(model, a_batch()).loss
    model.zero_grad(set_to_none=True)
    loss.backward()
    other = {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}
    assert difference(other, plain) > 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_give_the_same_bits(zoo_model, kind):
    model = learner(zoo_model("llama3"), kind)
    install(model)
    kept = gradients(model)
    enable_gradient_checkpointing(model)
    assert difference(gradients(model), kept) == 0


def masks_held(monkeypatch, model):
    """Dropout masks alive between the forward and the backward pass, and how many were drawn."""
    drawn = []
    plain = fast_adapters._draw

    def watched(*given):
        masks, kept = plain(*given)
        drawn.extend(weakref.ref(mask) for mask in masks)
        return masks, kept

    monkeypatch.setattr(fast_adapters, "_draw", watched)
    loss = sft_loss(model, a_batch()).loss
    held, count = sum(mask() is not None for mask in drawn), len(drawn)
    loss.backward()
    return held, count


def test_no_mask_is_held_for_layers_that_are_computed_again(zoo_model, monkeypatch):
    model = learner(zoo_model("llama3"), dropout=0.2)
    install(model)
    plain = gradients(model)
    held, drawn = masks_held(monkeypatch, model)
    assert held == drawn > 0  # the twin: without gradient checkpointing all are
    enable_gradient_checkpointing(model)
    held, again = masks_held(monkeypatch, model)
    assert held == 0
    assert again == drawn
    assert difference(gradients(model), plain) == 0


SETTINGS = {"betas": (0.9, 0.999), "momentum": None, "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("name", ["adamw", "adafactor", "rmsprop", "sgd", "muon", "fused"])
def test_what_follows_from_the_weights_follows_every_optimizer(zoo_model, name):
    model = learner(zoo_model("llama3"), "dora")
    trained = {key: one for key, one in model.named_parameters() if one.requires_grad}
    if name == "fused":  # which does not mark parameters as changed
        optimizer = torch.optim.AdamW(trained.values(), lr=0.1, fused=True)
    else:
        optimizer = make_optimizers({"all": trained}, {"all": OptimizerSettings(name, **SETTINGS)}, decoder=())
    install(model)
    before = gradients(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    found = gradients(model)
    fresh = copy.deepcopy(model)
    undo = install(fresh)
    assert difference(found, gradients(fresh)) == 0
    assert difference(found, before) > 1e-3
    undo()


def test_twin_without_the_clock_a_fused_step_would_not_be_noticed(zoo_model, monkeypatch):
    monkeypatch.setattr(fast_adapters._Clock, "_tick", lambda *_: None)
    with pytest.raises(AssertionError):
        test_what_follows_from_the_weights_follows_every_optimizer(zoo_model, "fused")


def test_weights_that_are_exchanged_or_written_are_noticed(zoo_model):
    model = learner(zoo_model("llama3"), "dora")
    install(model)
    first = gradients(model)
    own = {name: one.data for name, one in model.named_parameters() if one.requires_grad}
    for name, one in model.named_parameters():
        if one.requires_grad:
            one.data = own[name] * 1.5
    assert difference(gradients(model), first) > 0.01
    for name, one in model.named_parameters():
        if one.requires_grad:
            one.data = own[name]
    assert difference(gradients(model), first) == 0
    with torch.no_grad():
        for one in model.parameters():
            if one.requires_grad:
                one.copy_(one * 1.5)
    assert difference(gradients(model), first) > 0.01


@torch.no_grad()
def logits(model):
    return logits_at(model.eval(), a_batch(), EVERYWHERE)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_one_trunk_play_as_without(zoo_model, kind):
    trunk = SharedBackbone(learner(zoo_model("llama3"), kind).double())
    trunk.add_copy("critic", trainable=True)
    for name, parameter in trunk.model.named_parameters():
        parameter.data = parameter.data.double()
        if "critic" in name:
            parameter.data = parameter.data * 1.3

    def heard():
        found = {}
        for part in ("default", "critic", None):
            with trunk.use_adapter(part):
                found[part] = logits(trunk.model)
        return found

    plain = heard()
    undo = install(trunk.model)
    fast = heard()
    undo()
    assert all(float((fast[part] - plain[part]).abs().max()) < EXACT * 10 for part in plain)
    assert float((plain["default"] - plain["critic"]).abs().max()) > 1e-3
    assert float((plain["default"] - plain[None]).abs().max()) > 1e-3


def test_what_it_does_not_know_is_left_to_peft(zoo_model, passes):
    """Two adapters at once, an adapter switched off, merged weights, a base that trains."""
    trunk = SharedBackbone(learner(zoo_model("llama3")))
    trunk.add_copy("critic", trainable=True)
    model = trunk.model
    install(model)
    one = logits(model)
    assert len(passes) == 8
    passes.clear()
    layers = [module for module in model.modules() if isinstance(module, fast_adapters.LoraLinear)]
    for layer in layers:
        layer._active_adapter = ["default", "critic"]
    assert float((logits(model) - one).abs().max()) > 1e-3
    for layer in layers:
        layer._active_adapter = ["default"]
    with trunk.use_adapter(None):
        logits(model)
    model.merge_adapter()
    assert float((logits(model) - one).abs().max()) < 1e-4
    model.unmerge_adapter()
    for layer in layers:
        layer.get_base_layer().weight.requires_grad_(True)
    assert float((logits(model) - one).abs().max()) < 1e-4
    assert not passes


def test_a_16_bit_base_without_autocast_is_left_to_peft_which_computes_the_adapter_in_fp32(zoo_model, passes):
    model = narrow(learner(zoo_model("llama3")))
    plain = logits(model)
    install(model)
    assert torch.equal(logits(model), plain)
    assert not passes


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_pefts(zoo_model, tmp_path, kind):
    folder = zoo_model("qwen2")
    model = learner(folder, kind)
    install(model)
    before = saved(model, tmp_path / "fast")
    loaded = PeftModel.from_pretrained(base_model(folder), before)
    assert float((logits(loaded) - logits(model)).abs().max()) < 1e-4
    names = set(dict(model.named_parameters()))
    assert names == set(dict(learner(folder, kind).named_parameters()))


def test_a_copy_of_the_model_goes_its_own_way(zoo_model):
    model = learner(zoo_model("llama3"), "dora")
    install(model)
    before = gradients(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    assert difference(gradients(other), before) > 0.01
    assert difference(gradients(model), before) == 0


class Reads(TorchDispatchMode):
    """Counts how often the host asks for numbers of a device: by bool, float and item, and by tolist."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = 0
        plain = torch.Tensor.tolist

        def tolist(tensor):
            self.count += 1
            return plain(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


def reads_of_steps(zoo_model, monkeypatch, kind, **options):
    """Of each of three steps of two micro-batches. transformers looks at the padding of each."""
    model = learner(zoo_model("llama3"), kind, **options)
    install(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer, counts = torch.optim.SGD(trained, lr=0.1), []
    for _ in range(3):
        with Reads(monkeypatch) as seen:
            for _ in range(2):
                sft_loss(model, a_batch()).loss.backward()
            optimizer.step()
        counts.append(seen.count)
        optimizer.zero_grad()
    return counts


@pytest.mark.parametrize("options", [{}, {"dropout": 0.1}], ids=str)
def test_the_host_reads_once_more_in_a_step_for_the_factors_of_all_layers(zoo_model, monkeypatch, options):
    plain = reads_of_steps(zoo_model, monkeypatch, "lora", **options)
    assert plain == [plain[0]] * 3
    first, *others = reads_of_steps(zoo_model, monkeypatch, "dora", **options)
    assert first > plain[0] + 1  # one for each layer, when it is not known yet which there are
    assert others == [plain[0] + 1] * 2


def test_twin_layers_that_ask_for_themselves_alone_read_more_often(zoo_model, monkeypatch):
    monkeypatch.setattr(fast_adapters._Known, "used", property(lambda self: False, lambda self, value: None))
    plain, *_ = reads_of_steps(zoo_model, monkeypatch, "lora")
    _, *others = reads_of_steps(zoo_model, monkeypatch, "dora")
    assert min(others) > plain + 1


def test_factors_that_nobody_asks_for_are_not_made_again(zoo_model):
    model = learner(zoo_model("llama3"), "dora")
    install(model)
    group = causal_model(model).model.layers[0].self_attn.q_proj.forward.__self__.group
    made = group._factors._known
    gradients(model)
    layers = len(made)
    gradients(model, bf16)
    assert len(made) == 2 * layers
    for _ in range(2):
        with torch.no_grad():
            for one in model.parameters():
                if one.requires_grad:
                    one.mul_(1.1)
        gradients(model)
    assert len(made) == layers


def test_the_first_blocks_input_gets_no_gradient(zoo_model):
    """Nothing in front of it trains."""
    model = learner(zoo_model("llama3"))
    install(model)
    seen = []
    first = causal_model(model).model.layers[0].self_attn.q_proj
    handle = first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].requires_grad))
    gradients(model)
    handle.remove()
    assert seen == [False]
