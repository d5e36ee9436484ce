"""bos.scale 0 at depth: finite and equal to float64 where a plain hook ends in NaN, and plain where that is right.

The failing twin is kept: position 0 of the embedding's output times 0, as it was first done elsewhere. Each norm
divides the gradient of a stream of zeros by sqrt(eps), about 316 twice a layer, so it is infinite at some sixteen
layers, and 0 times infinity is NaN, in half of all parameters at 32. In float64 such numbers still fit, so that the
plain gradient is the reference.
"""

import copy
import math

import pytest
import torch
import transformers
from torch import nn

from helpers.plans import adapter_plan, linear_names
from helpers.tiers import representatives
from surefoot.models import bos
from surefoot.models.adapters import add_adapter
from surefoot.models.bos import install_bos_scaling
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.forward import causal_model

DEPTHS = (32, 48)
# Gradients of 32 layers in fp32, against float64: rounding that every layer passes on. Measured 1e-6 and 4e-6.
FP32 = 2e-5
# The same in bf16, whose 8 bits of mantissa every layer loses again: measured 0.08 and 0.11. That none of it comes from
# the cut is shown where the plain gradient is finite: there both are the same to the last bit.
BF16 = 0.2
# What leaving out a part of the gradient that is not zero does to it at the least (measured 0.3 to 1.0).
TELLING = 0.1
IDS = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(1))


def llama(layers, dtype=torch.float32, **keys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 128, "rms_norm_eps": 1e-5, "initializer_range": 0.16}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=layers, **(sizes | keys))
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def biased(name, layers=4):
    """Models whose biases are not zero, so that the stream of the first token is not either."""
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4}
    more = {
        "qwen2": {"intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.16},
        "opt": {
            "ffn_dim": 64,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
            "init_std": 0.16,
        },
        "gpt2": {
            "n_positions": 64,
            "initializer_range": 0.16,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(name, **sizes, **more[name])
    ).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def in_float64(model):
    """A copy in which nothing is narrower: transformers' norms and softmaxes go through fp32 by themselves."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm(module)
    causal_model(model).set_attn_implementation("sdpa")
    return model


def _norm(module):
    def forward(hidden):
        return module.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)

    return forward


def gradients(model, *, plain=False):
    """Of every parameter that trains. plain: the twin's hook in place of ours."""

    def times_zero(module, args, output):
        scaled = output.clone()
        scaled[:, 0] = scaled[:, 0] * 0.0
        return scaled

    if plain:
        handle = causal_model(model).get_input_embeddings().register_forward_hook(times_zero)
    else:
        handle = install_bos_scaling(model, 0.0)
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    handle.remove()
    assert torch.isfinite(loss)
    return {name: p.grad.double() for name, p in model.named_parameters() if p.requires_grad}


def finite(found):
    return all(bool(torch.isfinite(gradient).all()) for gradient in found.values())


def apart(found, wanted):
    """Distance as a share of the length, over all parameters together."""
    assert found.keys() == wanted.keys()
    total = sum(float((found[name] - wanted[name]).pow(2).sum()) for name in wanted)
    return math.sqrt(total / sum(float(gradient.pow(2).sum()) for gradient in wanted.values()))


@pytest.mark.parametrize("layers", representatives(DEPTHS, 48))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FP32), (torch.bfloat16, BF16)])
def test_deep_and_finite(layers, dtype, tolerance):
    model = llama(layers, dtype)
    found = gradients(model)
    assert finite(found)
    assert not finite(gradients(model, plain=True))  # the failing twin
    wanted = gradients(in_float64(model), plain=True)
    assert finite(wanted)  # up to 1e240, which is why it is the reference
    assert apart(found, wanted) < tolerance


@pytest.mark.parametrize("kind", representatives(["lora", "dora"], "dora"))
def test_deep_under_an_adapter(kind):
    """With B away from zero, where an adapter starts."""
    model = llama(32)
    adapted = add_adapter(model, adapter_plan(linear_names(model), kind=kind), seed=1, base="b")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    found = gradients(adapted)
    assert finite(found)
    assert not finite(gradients(adapted, plain=True))
    assert apart(found, gradients(in_float64(adapted), plain=True)) < FP32


def test_deep_with_gradient_checkpointing():
    model = llama(32)
    wanted = gradients(model)
    enable_gradient_checkpointing(model)
    found = gradients(model)
    assert finite(found)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not finite(gradients(model, plain=True))


@pytest.mark.parametrize("layers", representatives([1, 2, 4, 8], 1, 4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_the_plain_gradient_is_finite_it_is_the_same_to_the_last_bit(layers, dtype):
    """What is cut would have been multiplied by zeros."""
    model = llama(layers, dtype)
    found, wanted = gradients(model), gradients(model, plain=True)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("family", ["qwen2", "opt", "gpt2"])
def test_biases_make_the_plain_gradient_the_right_one(family, monkeypatch):
    """Frozen or trained: the stream is not zero, which every forward pass sees for itself."""
    model = biased(family)
    for trained in (True, False):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained or "bias" not in name)
        wanted = gradients(in_float64(model), plain=True)
        assert apart(gradients(model), wanted) < FP32
        with monkeypatch.context() as patch:  # twin: cut without looking
            patch.setattr(bos, "_trains_a_bias", lambda decoder: False)
            patch.setattr(bos, "_cut_where_zero", lambda h, s: torch.where(s[..., None], h.detach(), h))
            assert apart(gradients(model), wanted) > TELLING


def test_a_bias_of_zero_that_trains_feels_the_stream(monkeypatch):
    """The stream is exactly zero, and its gradient is still the bias's: only the plain one is right."""
    model = llama(4, attention_bias=True, mlp_bias=True)  # biases begin at zero
    wanted = gradients(in_float64(model), plain=True)
    assert apart(gradients(model), wanted) < FP32
    monkeypatch.setattr(bos, "_trains_a_bias", lambda decoder: False)
    assert apart(gradients(model), wanted) > TELLING  # twin
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name)
    assert apart(gradients(model), gradients(in_float64(model), plain=True)) < FP32  # frozen, it may be cut


def test_every_sequence_is_looked_at_for_itself():
    """Of two rows, one begins with a stream that something moves: it keeps its gradient, the other's is cut."""
    stream = torch.tensor([[[0.0, 0.0], [1.0, 2.0]], [[0.0, 1e-30], [0.0, 0.0]]], requires_grad=True)
    starts = torch.tensor([[True, False], [True, False]])
    cut = bos._cut_where_zero(stream, starts)
    assert torch.equal(cut, stream)
    cut.sum().backward()
    assert stream.grad.tolist() == [[[0.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]]


def test_what_counts_as_added_to_the_stream():
    model = llama(1, attention_bias=True)
    decoder = model.get_decoder()
    assert bos._trains_a_bias(decoder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" not in name)
    assert not bos._trains_a_bias(decoder)
    decoder.places = nn.Embedding(4, 32)
    assert bos._trains_a_bias(decoder)
