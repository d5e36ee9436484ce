"""What a training step multiplies, counted where torch dispatches it, against the arithmetic: nothing is computed in
the last layer for rows that nobody reads, and no gradient of what enters the first layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import zoo
from helpers.architectures import LLAMA, build
from helpers.plans import adapter_plan, linear_names
from helpers.tiers import diagonal
from helpers.zoo_adapters import adapted
from surefoot.data.batching.batch import Example, collate, pack, unpacked
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.adapters import add_adapter
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.decoder import decoder_layers, last_layer
from surefoot.models.fast.adapters import adapter_path
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.last_block import last_block_path
from surefoot.models.fast.packing import packed_attention
from surefoot.models.forward import causal_model
from surefoot.models.peft import LoraLayer
from surefoot.models.product_flops import ProductFlops

# Angles of rotary positions are products of an outer form, 2 * T * d / 2 in all, which the arithmetic leaves out.
TOLERANCE = 1e-3
LENGTHS, SUPERVISED = (64, 64, 64, 64), 0.125  # such as need no filling, see `surefoot.kernels.operands`
RANK = 4
HIDDEN, MLP, VOCAB, LAYERS, HEADS, KV, HEAD = 256, 640, 70, 3, 4, 2, 64


def packed():
    draw = np.random.default_rng(0)
    return pack(
        [
            Example(draw.integers(3, VOCAB, n), np.arange(n) >= n - round(SUPERVISED * n), i)
            for i, n in enumerate(LENGTHS)
        ]
    )


def flops(model, batch, *, autocast=True) -> int:
    model.zero_grad(set_to_none=True)
    with ProductFlops() as seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = sft_loss(model, batch).loss
        loss.backward()
    return seen.total


def llama(*paths):
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "head_dim": HEAD}
    base = build(LLAMA | sizes | {"tie_word_embeddings": False}, device="cpu", attn_implementation="sdpa")
    model = add_adapter(base, adapter_plan(linear_names(base), rank=RANK), seed=1, base="base", autocast=True).train()
    for path in (packed_attention("matmul"), adapter_path(), loss_path(64), *paths):
        path.install(model)
    return model


def linear(rows: int, inputs: int, outputs: int, *, into: bool = True) -> int:
    """Of one adapted layer, forward and backward. into: whether its input wants a gradient."""
    thin = 2 * rows * RANK * (inputs + outputs)
    wide = 2 * rows * inputs * outputs
    parameters = 2 * rows * RANK * (outputs + inputs + outputs)  # dy B, g^T x, h^T dy
    return wide + thin + parameters + (wide + 2 * rows * RANK * inputs if into else 0)


def step(tokens: int, read: int, last: int) -> int:
    """Of the whole step. last: rows that the last layer computes behind its attention."""
    reads = [(HIDDEN, HEADS * HEAD), (HIDDEN, KV * HEAD), (HIDDEN, KV * HEAD)]
    behind = [(HEADS * HEAD, HIDDEN), (HIDDEN, MLP), (HIDDEN, MLP), (MLP, HIDDEN)]
    front = sum(linear(tokens, *one, into=layer > 0) for layer in range(LAYERS) for one in reads)
    rest = sum(linear(tokens if layer < LAYERS - 1 else last, *one) for layer in range(LAYERS) for one in behind)
    scores = sum(2 * n * n * HEADS * HEAD for n in LENGTHS)
    attention = LAYERS * scores * 7  # two products; one of them again, and two more of each, backward
    head = 2 * 2 * read * HIDDEN * VOCAB  # forward, and the gradient of what it reads
    return front + rest + attention + head


def test_a_step_is_its_arithmetic():
    batch = packed()
    assert batch.weight == pytest.approx(SUPERVISED * batch.tokens)
    wanted = step(batch.tokens, batch.weight, batch.weight)
    assert flops(llama(last_block_path()), batch) == pytest.approx(wanted, rel=TOLERANCE)


def test_twin_without_the_path_the_last_layer_is_as_dear_as_the_others():
    batch = packed()
    plain = flops(llama(), batch)
    assert plain == pytest.approx(step(batch.tokens, batch.weight, batch.tokens), rel=TOLERANCE)
    assert plain != pytest.approx(step(batch.tokens, batch.weight, batch.weight), rel=10 * TOLERANCE)


@pytest.mark.parametrize(("family", "fast"), diagonal(sorted(zoo.ZOO), [False, True]))
def test_the_first_layers_input_gets_no_gradient_in_any_family(zoo_model, family, fast):
    """The twin is what a gradient there costs, which is known exactly: one more product of every linear layer that
    reads the first norm, and one of its adapter."""
    model = adapted(zoo_model(family), "lora", 1).eval()  # without dropout
    if fast:
        adapter_path().install(model)
    batch = collate(
        [Example(np.arange(3, 12), np.arange(9) > 4, 0), Example(np.arange(9, 20), np.arange(11) > 4, 1)], 0
    )
    plain = flops(model, batch, autocast=False)
    causal_model(model).enable_input_require_grads()
    assert flops(model, batch, autocast=False) - plain == input_gradient(model, batch.input_ids.numel())


def input_gradient(model, tokens: int) -> int:
    attention = last_layer(model).attention
    layers = [one for one in attention.modules() if isinstance(one, LoraLayer)]
    reading = [one for one in layers if one is not last_layer(model).projection]
    assert reading
    rank = reading[0].r["default"]
    return sum(2 * tokens * one.in_features * (one.out_features + rank) for one in reading)


@pytest.mark.parametrize("order", ["before", "behind"])
def test_checkpointing_asks_frozen_embeddings_for_no_gradient(order):
    """Whichever is there first, checkpointing or the adapter."""
    model = build(LLAMA, device="cpu")
    if order == "before":
        enable_gradient_checkpointing(model)
    model = add_adapter(model, adapter_plan(linear_names(model)), seed=1, base="base").train()
    if order == "behind":
        enable_gradient_checkpointing(model)
    assert not entering(model)
    causal_model(model).enable_input_require_grads()  # twin: what PEFT and transformers do
    assert entering(model)


def entering(model) -> bool:
    """Whether what enters the first layer wants a gradient."""
    found = []

    def see(layer, inputs, named):
        found.append((inputs[0] if inputs else named["hidden_states"]).requires_grad)

    hook = decoder_layers(model)[0].register_forward_pre_hook(see, with_kwargs=True)
    sft_loss(model, unpacked(packed(), 0)).loss.backward()
    hook.remove()
    return any(found)
