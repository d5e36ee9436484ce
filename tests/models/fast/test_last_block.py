"""The last layer without rows that nobody reads: every family against the plain pass, and where it must stay away."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.other import ModulesToSaveWrapper
from transformers import LlamaForCausalLM

from helpers import zoo
from helpers.architectures import GPT2, OPT, build
from helpers.tiers import diagonal
from helpers.tiny_models import tiny_llama
from helpers.zoo_adapters import adapted, base_model
from surefoot.data.batching.batch import Example, PairBatch, collate, pack
from surefoot.methods.losses.logprobs import adapter_off, frozen
from surefoot.methods.losses.reward import _last_tokens, reward_objective
from surefoot.methods.losses.sft import sft_loss, supervised_places
from surefoot.models.bos import install_bos_scaling
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.decoder import decoder_layers, last_layer
from surefoot.models.embeddings import noisy_embeddings
from surefoot.models.fast import last_block as last_block_module
from surefoot.models.fast.adapters import adapter_path
from surefoot.models.fast.last_block import _Pruned, install, last_block_path, obstacle
from surefoot.models.fast.packing import packed_attention
from surefoot.models.fast.pointwise import pointwise_path
from surefoot.models.forward import hidden_at, hidden_states, logits_at, narrowed_logits
from surefoot.models.modes import set_dropout
from surefoot.models.product_flops import ProductFlops
from surefoot.models.value_head import ScoredModel, ValueHead

# Products in float64; norms of some families compute in fp32 (Gemma, Cohere), where another number of rows may be
# summed in another order. 4e-7 seen.
EXACT = 2e-6
FP32 = 2e-5  # 24 bits over a few hundred operations
BF16 = 5e-2  # 8 bits; the plain pass differs as much from float64
KINDS = ("full", "lora", "dora")
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 70,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
# MLP beside attention, norms behind their part, no norm in front or none at the end, factors on the sums, experts.
OTHERS = {
    "phi": _GROUPED | {"model_type": "phi"},
    "parallel": _SIZES | {"model_type": "gpt_neox"},
    "in turn": _SIZES | {"model_type": "gpt_neox", "use_parallel_residual": False},
    "olmo2": _GROUPED | {"model_type": "olmo2"},
    "cohere": _GROUPED | {"model_type": "cohere"},
    "granite": _GROUPED | {"model_type": "granite", "residual_multiplier": 0.5},
    "opt 350m": OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "mixtral": _GROUPED | {"model_type": "mixtral", "num_local_experts": 4},
}


def examples():
    """Ids behind those of special tokens; a quarter of each is learned."""
    draw = np.random.default_rng(2)
    return [Example(draw.integers(20, 60, n), np.arange(n) >= 0.75 * n, i) for i, n in enumerate((9, 15, 12))]


BATCH = collate(examples(), 0)
PLACES, _ = supervised_places(BATCH)


def learner(folder, kind="full"):
    model = base_model(folder) if kind == "full" else adapted(folder, kind, 1)
    set_dropout(model, 0.0)
    return model.train()


def flat(name, **keys):
    torch.manual_seed(0)
    model = build(OTHERS.get(name, GPT2) | keys, device="cpu")
    set_dropout(model, 0.0)
    return model.train()


@pytest.fixture
def narrowed(monkeypatch):
    """How many rows each pass left in the last layer."""
    seen = []
    plain = last_block_module._Pruned._rows

    def watched(self, places, *others, **named):
        seen.append(len(places))
        return plain(self, places, *others, **named)

    monkeypatch.setattr(last_block_module._Pruned, "_rows", watched)
    return seen


def measured(model, batch=BATCH, context: Any = nullcontext):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with context():
        loss = sft_loss(model, batch).loss
    loss.backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def difference(found, wanted) -> float:
    """The largest, as a share of the loss, or of a gradient's norm and at least a thousandth of the largest one's."""
    assert found[1].keys() == wanted[1].keys()
    least = 1e-3 * max(float(one.norm()) for one in wanted[1].values())
    shares = [float((found[1][name] - one).norm()) / max(float(one.norm()), least) for name, one in wanted[1].items()]
    return max(abs(float((found[0] - wanted[0]) / wanted[0])), *shares)


def differs_by(model, batch=BATCH, context: Any = nullcontext) -> float:
    plain = measured(model, batch, context)
    undo = last_block_path().install(model)
    found = difference(measured(model, batch, context), plain)
    undo()
    assert difference(measured(model, batch, context), plain) == 0
    return found


@pytest.mark.parametrize(("family", "kind"), diagonal(sorted(zoo.ZOO), KINDS))
def test_every_family_learns_the_same(zoo_model, narrowed, family, kind):
    model = learner(zoo_model(family), kind).double()
    assert not obstacle(model)
    assert differs_by(model) <= EXACT
    assert narrowed == [BATCH.weight]


@pytest.mark.parametrize("more", [3, 1000])
def test_some_more_rows_that_nobody_reads_change_nothing(zoo_model, narrowed, monkeypatch, more):
    """As 16-bit products get them; never more than there are."""
    monkeypatch.setattr(last_block_module, "round_up_rows", lambda rows, dtype, device: rows + more)
    assert differs_by(learner(zoo_model(min(zoo.ZOO))).double()) <= EXACT
    assert narrowed == [min(BATCH.weight + more, BATCH.input_ids.numel())]


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_layers_that_are_built_otherwise(narrowed, name):
    model = flat(name)
    assert not obstacle(model)
    assert differs_by(model if name == "mixtral" else model.double()) <= (FP32 if name == "mixtral" else EXACT)
    assert narrowed == [BATCH.weight]


@pytest.mark.parametrize("wrong", ["_spread", "_at"])
@pytest.mark.parametrize("family", ["llama3", "gpt2", "gemma2"])
def test_twin_rows_in_another_order_are_seen(zoo_model, monkeypatch, family, wrong):
    plain = getattr(last_block_module, wrong)
    monkeypatch.setattr(last_block_module, wrong, lambda rows, places, *shape: plain(rows, places.roll(1), *shape))
    assert differs_by(learner(zoo_model(family)).double()) > 100 * EXACT


@pytest.mark.parametrize(("family", "kind"), diagonal(["llama3", "phi3", "opt", "gpt2"], ["lora", "dora"]))
def test_under_adapters_of_our_own(zoo_model, narrowed, family, kind):
    model = learner(zoo_model(family), kind).double()
    adapter_path().install(model)
    assert differs_by(model) <= EXACT
    assert narrowed == [BATCH.weight]


def test_over_norms_and_rotations_of_our_own(zoo_model, narrowed):
    model = learner(zoo_model("llama3"), "lora")
    pointwise_path("cpu").install(model)
    assert not obstacle(model)
    assert differs_by(model) <= FP32
    assert narrowed == [BATCH.weight]


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(zoo_model, narrowed, kind):
    model = learner(zoo_model("llama3"), kind)
    assert differs_by(model, context=lambda: torch.autocast("cpu", torch.bfloat16)) <= BF16
    assert narrowed == [BATCH.weight]


@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_where_layers_are_computed_again(zoo_model, narrowed, kind, layers):
    """In all of them the last one is, too; it is computed again for the same rows, where nobody says which."""
    model = learner(zoo_model("llama3"), kind).double()
    plain = measured(model)
    last_block_path().install(model)
    enable_gradient_checkpointing(model, layers)
    assert difference(measured(model), plain) <= EXACT
    assert narrowed == [BATCH.weight] * (2 if layers is None else 1)
    assert decoder_layers(model)[-1].gradient_checkpointing == (layers is None)


def test_packed_rows(zoo_model, narrowed):
    model = learner(zoo_model("llama3"), "lora").double()
    packed_attention("matmul").install(model)
    assert differs_by(model, pack(examples())) <= EXACT
    assert narrowed == [BATCH.weight]


def test_padding_in_front(zoo_model, narrowed):
    assert differs_by(learner(zoo_model("llama3")).double(), collate(examples(), 0, "left")) <= EXACT
    assert narrowed == [BATCH.weight]


def test_noise_on_the_embeddings_is_the_same(zoo_model):
    model = learner(zoo_model("llama3")).double()
    noise = lambda: noisy_embeddings(model, 5.0, BATCH.lengths)  # noqa: E731
    assert differs_by(model, context=noise) <= EXACT
    assert difference(measured(model, context=noise), measured(model)) > EXACT


def test_what_is_read_is_what_would_have_been_gathered(zoo_model):
    model = learner(zoo_model("qwen3")).double()
    with torch.no_grad():
        whole = hidden_states(model, BATCH).flatten(0, 1)
        logits = logits_at(model, BATCH, PLACES)
        last_block_path().install(model)
        assert hidden_at(model, BATCH, PLACES) == pytest.approx(whole[PLACES], rel=EXACT)
        assert logits_at(model, BATCH, PLACES) == pytest.approx(logits, rel=EXACT)
        assert torch.equal(hidden_states(model, BATCH).flatten(0, 1), whole)  # asked for all of them


@torch.no_grad()
def test_a_prompt_fills_the_same_cache(zoo_model, narrowed):
    model = learner(zoo_model("llama3")).double().eval()
    caches = []
    last = torch.tensor([13, 27, 41])  # of each of three rows of 14
    for _ in range(2):
        cache = model(input_ids=BATCH.input_ids[:, :1], use_cache=True).past_key_values
        narrowed_logits(model, last, input_ids=BATCH.input_ids[:, 1:], past_key_values=cache, use_cache=True)
        caches.append(cache)
        last_block_path().install(model)
    assert narrowed == [3]
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@contextmanager
def dropping(model):
    set_dropout(model, 0.1)
    yield


@contextmanager
def watching(model):
    hook = decoder_layers(model)[-1].register_forward_hook(lambda *_: None)
    yield
    hook.remove()


@contextmanager
def scaling(model):
    scaled = install_bos_scaling(model, 0.0)
    yield
    assert scaled is not None
    scaled.remove()


@pytest.mark.parametrize("somebody", [dropping, watching, scaling])
def test_the_pass_is_plain_where_other_rows_matter(zoo_model, narrowed, somebody):
    model = learner(zoo_model("llama3"), "lora").double()
    last_block_path().install(model)
    with somebody(model):
        found = measured(model)
        assert not narrowed
    if somebody is not dropping:
        undone = learner(zoo_model("llama3"), "lora").double()
        with somebody(undone):
            assert difference(found, measured(undone)) == 0
        measured(model)
        assert narrowed  # twin


def test_nothing_or_everything_read_is_a_plain_pass(zoo_model, narrowed):
    model = learner(zoo_model("llama3")).double()
    last_block_path().install(model)
    for places in (PLACES[:0], torch.arange(BATCH.input_ids.numel())):
        assert logits_at(model, BATCH, places).shape[0] == len(places)
    assert not narrowed


def test_it_saves_products(zoo_model):
    model = learner(zoo_model("llama3"))
    counts = []
    for _ in range(2):
        with ProductFlops() as seen:
            measured(model)
        counts.append(seen.total)
        last_block_path().install(model)
    assert counts[1] < counts[0]


def test_a_copy_of_a_model_narrows_by_itself(zoo_model, narrowed):
    model = learner(zoo_model("llama3")).double()
    plain = measured(model)
    undo = last_block_path().install(model)
    other = copy.deepcopy(model)
    undo()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert difference(measured(other), plain) <= EXACT
    assert narrowed == [BATCH.weight]


def test_taken_out_nothing_is_left(zoo_model):
    model = learner(zoo_model("llama3"))
    before = {
        name: (set(vars(one)), len(one._forward_hooks), len(one._forward_pre_hooks)) for name, one in named(model)
    }
    last_block_path().install(model)()
    assert before == {
        name: (set(vars(one)), len(one._forward_hooks), len(one._forward_pre_hooks)) for name, one in named(model)
    }


def named(model):
    return dict(model.named_modules()).items()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 70}, "more than hidden"),
        ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 70}, "identified"),
        (OTHERS["mixtral"] | {"output_router_logits": True}, "router logits"),
    ],
    ids=["bloom", "mamba", "router"],
)
def test_layers_that_are_not_understood_are_left_alone(config, why):
    torch.manual_seed(0)
    assert why in obstacle(build(config, device="cpu"))


@torch.no_grad()
@pytest.mark.parametrize(
    "arrange", [lambda: collate(examples(), 0), lambda: pack(examples())], ids=["padded", "packed"]
)
def test_scores_read_the_last_tokens_alone(zoo_model, narrowed, arrange):
    """Three answers of which the loss of a reward model reads one value each."""
    rows = arrange()
    scored = ScoredModel(learner(zoo_model("llama3")), ValueHead(32))
    if rows.documents:
        packed_attention("matmul").install(scored.backbone)
    with torch.no_grad():
        scored.v_head.summary.weight.normal_()
    ends = _last_tokens(rows)
    assert ends is not None
    plain = scored(rows).flatten()[ends]
    last_block_path().install(scored)
    assert scored(rows, read=ends).flatten()[ends] == pytest.approx(plain, rel=FP32)
    assert narrowed == [3]
    assert scored(rows).flatten()[ends] == pytest.approx(plain, rel=FP32)
    assert narrowed == [3]  # nobody said which


def test_the_loss_of_a_reward_model_reads_no_more(zoo_model, narrowed):
    answers = [*examples(), examples()[0]]
    scored = ScoredModel(learner(zoo_model("llama3")), ValueHead(32))
    batch = PairBatch(collate(answers, 0), (0, 0), 2)
    objective = reward_objective("last")
    with torch.no_grad():
        scored.v_head.summary.weight.normal_()
    losses = []
    for _ in range(2):
        losses.append(float(objective(scored, batch).loss))
        last_block_path().install(scored)
    assert losses[1] == pytest.approx(losses[0], rel=FP32)
    assert narrowed == [4]
    reward_objective("divergence")(scored, batch)  # twin: it reads many more
    assert narrowed == [4]


def test_a_pass_without_the_adapter_has_the_bases_norms(tmp_path):
    """Norms in modules_to_save, with which an adapter's reference must not compute."""
    base = LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path / "base"))
    kinds = {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]}
    policy = get_peft_model(base, LoraConfig(r=2, **kinds)).eval()
    norms = [one for one in policy.modules() if isinstance(one, ModulesToSaveWrapper)]
    with torch.no_grad():
        for one in norms:
            one.modules_to_save["default"].weight.mul_(torch.linspace(0.5, 2, 32))
    rows = collate([Example(np.arange(4, 24), np.arange(20) >= 15, 0)], 0)
    plain, trained = adapter_off(policy)(rows), frozen(policy)(rows)
    undo = install(policy)
    assert torch.allclose(adapter_off(policy)(rows), plain, rtol=FP32)
    assert torch.allclose(frozen(policy)(rows), trained, rtol=FP32)
    undo()
    block = last_layer(base)
    assert any(block.norm is one for one in norms)
    pruned = _Pruned(replace(block, norm=block.norm.modules_to_save["default"]))  # twin: the adapter's, always
    assert not torch.allclose(adapter_off(policy)(rows), plain, rtol=FP32)
    pruned.remove()
