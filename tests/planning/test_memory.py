"""The forecast against what autograd really keeps, in transformers' model with PEFT's adapters."""

import gc
import itertools
import json
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.architectures import TINY, build
from helpers.model_layouts import LLAMA31_8B, model_facts, run_config
from helpers.tiers import representatives
from surefoot.data.batching.batch import Batch, Example, pack
from surefoot.kernels.chunked_loss import Head, summed_loss
from surefoot.kernels.packed_attention import SHORT
from surefoot.models.facts import facts_of
from surefoot.models.fast.adapters import _Made, adapter_path
from surefoot.models.fast.last_block import last_block_path
from surefoot.models.fast.packing import packed_attention
from surefoot.models.forward import hidden_at, hidden_states
from surefoot.planning import memory as module
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.attention import plan_attention
from surefoot.planning.experts import as_dense
from surefoot.planning.measurements import Measurements
from surefoot.planning.memory import fits, forecast, layer_bytes, unread_bytes, usable
from surefoot.planning.notes import Notes
from surefoot.planning.optimizer import state_bytes, trainable_tensors
from surefoot.planning.plan import Choice
from surefoot.planning.precision import plan_precision
from surefoot.planning.workload import Workload
from surefoot.system.hardware import GIB, preset

# The formula leaves out a row statistic here and a cast copy of an adapter matrix there, and rounds up for attention
# that stores its probabilities.
TOLERANCE = 0.05
# Row statistics and what an adapter's input is beside it weigh more at 128 numbers than in a model that is trained.
FAST_TOLERANCE = 0.08
CONFIG = LLAMA31_8B | {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 64,
}
MIXTURE = CONFIG | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
ROWS, TOKENS = 2, 96
OFF = Choice(False, "", "default")


def workload(folder, *, adapter=None, precision="fp32", attention="sdpa", config=CONFIG, model=None):
    notes, machine = Notes(), preset("cpu")
    model = model or model_facts(folder, config)
    request = run_config(adapter=adapter, precision=precision, attention=attention)
    types = plan_precision(request, model, machine, Measurements(), {}, notes)
    kernels = plan_attention(
        request.attention,
        hardware=machine,
        compute=types.compute.value,
        head_dim=model.head_dim,
        dropout=0.0,
        trials=(),
        notes=notes,
    )
    planned = plan_adapter(request.adapter, model, 0, notes) if request.adapter else None
    assert not notes.faults
    trainable = planned.trainable if planned else model.parameters
    moments = state_bytes(request.optim, trainable_tensors(model, planned, 0))
    return Workload(model, types, kernels, planned, trainable, model.parameters, moments)


def mixture(folder, config=MIXTURE):
    (folder / "config.json").write_text(json.dumps(config))
    return facts_of(folder)


def kept_per_layer(work, adapter, attention, config=CONFIG):
    """Bytes that one more decoder layer keeps for its backward pass: the difference of two depths."""
    return _kept(work, adapter, attention, config, 2) - _kept(work, adapter, attention, config, 1)


def forward(model, packed):
    """ROWS examples of TOKENS: padded, or as documents of a packed row."""
    if packed == "plain":
        return model.get_decoder()(input_ids=torch.zeros(ROWS, TOKENS, dtype=torch.long)).last_hidden_state
    packed_attention(packed).install(model)
    example = Example(np.zeros(TOKENS, dtype=np.int64), np.ones(TOKENS, dtype=bool), 0)
    return hidden_states(model, pack([example] * ROWS))


def _kept(work, adapter, attention, config, layers):
    depth = {"n_layer" if "n_layer" in config else "num_hidden_layers": layers}
    implementation = "eager" if attention == "eager" else "sdpa"
    base = {"fp32": torch.float32, "bf16": torch.bfloat16}[work.precision.base.value]
    model = build(config | depth | {"use_cache": False}, device="cpu", attn_implementation=implementation).to(base)
    if adapter:
        lora = LoraConfig(
            r=adapter["rank"],
            target_modules="all-linear",
            use_dora=adapter["kind"] == "dora",
            lora_dropout=adapter.get("dropout", 0.0),
        )
        model = get_peft_model(model, lora).get_base_model()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    kernels = sdpa_kernel(SDPBackend.MATH) if attention == "math" else nullcontext()
    cast = torch.autocast("cpu", torch.bfloat16, enabled=work.autocast)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), kernels, cast:
        hidden = forward(model.train(), work.documents)
    del hidden
    return sum(storage.nbytes() for storage in kept.values())


LORA, DORA = {"kind": "lora", "rank": 8}, {"kind": "dora", "rank": 8}
BOTH = {"compute": "bf16", "base": "fp32"}
CASES = [
    (None, "fp32", "flash"),
    (None, "bf16", "flash"),
    (LORA, "fp32", "flash"),
    (LORA, "bf16", "flash"),
    (LORA, BOTH, "flash"),
    (LORA | {"dropout": 0.1}, "fp32", "flash"),
    (LORA | {"dropout": 0.1}, "bf16", "flash"),
    (DORA, "fp32", "flash"),
    (DORA, "bf16", "flash"),
    (DORA | {"dropout": 0.1}, "bf16", "flash"),
    (LORA, "fp32", "eager"),
    (LORA, "bf16", "eager"),
    (None, "fp32", "math"),
    (LORA, "bf16", "math"),
]


def check_activations_are_what_autograd_keeps(tmp_path, adapter, precision, attention):
    request = {"flash": "sdpa", "eager": "eager", "math": {"flash": "off"}}[attention]
    work = workload(tmp_path, adapter=adapter, precision=precision, attention=request)
    assert work.attention.expected.value == attention
    kept = kept_per_layer(work, adapter, attention)
    cast_copies = work.width * (_cast_per_layer(work) if work.autocast else 0)  # counted among the weights
    assert layer_bytes(work, ROWS * TOKENS, TOKENS) == pytest.approx(kept - cast_copies, rel=TOLERANCE)


def test_activations_are_what_autograd_keeps(tmp_path):
    for adapter, precision, attention in CASES:
        check_activations_are_what_autograd_keeps(tmp_path, adapter, precision, attention)


def test_activations_over_a_quantized_base(tmp_path, monkeypatch):
    """Beside bitsandbytes' layers PEFT leaves the input as it is, so that layers share it."""
    real = get_peft_model

    def without_casts(*given):
        model = real(*given)
        for one in model.modules():
            if hasattr(one, "cast_input_dtype_enabled"):
                one.cast_input_dtype_enabled = False
        return model

    monkeypatch.setattr(sys.modules[__name__], "get_peft_model", without_casts)
    work = workload(tmp_path, adapter=LORA, precision="bf16", attention="sdpa")
    kept = kept_per_layer(work, LORA, "flash") - work.width * _cast_per_layer(work)
    packed = replace(work, precision=replace(work.precision, base=Choice("nf4", "", "user")))
    assert layer_bytes(packed, ROWS * TOKENS, TOKENS) == pytest.approx(kept, rel=FAST_TOLERANCE)
    assert layer_bytes(work, ROWS * TOKENS, TOKENS) != pytest.approx(kept, rel=FAST_TOLERANCE)  # twin: a copy for each


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [LORA, DORA], ids=["lora", "dora"])
def test_activations_with_our_own_adapter_arithmetic(tmp_path, monkeypatch, adapter, precision):
    work = replace(workload(tmp_path, adapter=adapter, precision=precision), fast_adapter=True)
    kept = fast_kept(work, adapter, monkeypatch)
    cast_copies = work.width * work.adapter.trainable // work.model.layers if work.autocast else 0
    assert layer_bytes(work, ROWS * TOKENS, TOKENS) == pytest.approx(kept - cast_copies, rel=FAST_TOLERANCE)


@pytest.mark.parametrize("precision", ["fp32", "bf16", BOTH], ids=["fp32", "bf16", "over fp32"])
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("to", "group"), [("int4", 32), ("int8-int4", 32), ("int8", None), ("nvfp4", 16), ("mxfp4", 32)]
)
def test_activations_where_weights_are_rounded(tmp_path, monkeypatch, adapter, precision, to, group):
    pytest.importorskip("torchao", reason="make qat installs it")
    from surefoot.models.qat import round_weights

    if adapter is None and precision is BOTH:
        pytest.skip("what trains is in fp32")
    plain, work = build, workload(tmp_path, adapter=adapter, precision=precision)
    qat = replace(work.precision.qat, value=to)
    rounding = replace(work, precision=replace(work.precision, qat=qat, qat_group=group))

    def rounded(*args, **options):
        model = plain(*args, **options)
        round_weights(model, to, group)
        return model

    without = kept_per_layer(work, adapter, "flash")
    monkeypatch.setattr(sys.modules[__name__], "build", rounded)
    more = kept_per_layer(work, adapter, "flash") - without
    planned = layer_bytes(rounding, ROWS * TOKENS, TOKENS) - layer_bytes(work, ROWS * TOKENS, TOKENS)
    assert 0.85 * more - 0.02 * without <= planned <= 1.3 * more + 0.02 * without


def fast_kept(work, adapter, monkeypatch):
    """As `kept_per_layer`, with the adapter's own kernels in the model."""
    plain = forward

    def fast(model, packed):
        adapter_path().install(model)
        return plain(model, packed)

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "forward", fast)
        return kept_per_layer(work, adapter, "flash")


def test_twin_outputs_that_others_keep_anyway_counted_twice_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_ANYWAY", ())
    with pytest.raises(AssertionError):
        test_activations_with_our_own_adapter_arithmetic(tmp_path, monkeypatch, DORA, "bf16")


@pytest.mark.parametrize("number", [2, 4])
def test_fused_norms_keep_what_their_kernel_says(tmp_path, number):
    adapter = LORA if number == 2 else None
    work = replace(workload(tmp_path, adapter=adapter, precision="bf16"), fused_norms=True)
    assert module._norm_bytes(work) == 2 * (CONFIG["hidden_size"] * number + 4)  # two norms: x, and 1 / rms in fp32


def test_a_fused_gate_keeps_less(tmp_path):
    """A tensor of the MLP's width: silu(gate)."""
    work = workload(tmp_path, adapter=LORA, precision="bf16")
    less = layer_bytes(work, TOKENS, TOKENS) - layer_bytes(replace(work, fused_gates=True), TOKENS, TOKENS)
    assert less == TOKENS * work.width * CONFIG["intermediate_size"]


PACKED = [(None, "fp32"), (LORA, "fp32"), (LORA, "bf16"), (DORA, "bf16")]


def check_activations_of_packed_rows(tmp_path, adapter, precision, heads, form):
    config = CONFIG | {"num_key_value_heads": heads}
    work = replace(workload(tmp_path, adapter=adapter, precision=precision, config=config), documents=form)
    kept = kept_per_layer(work, adapter, "flash", config)
    cast_copies = work.width * (_cast_per_layer(work) if work.autocast else 0)
    assert layer_bytes(work, ROWS * TOKENS, TOKENS) == pytest.approx(kept - cast_copies, rel=TOLERANCE)


def test_activations_of_packed_rows(tmp_path):
    for adapter, precision in PACKED:
        for heads in [2, 4]:
            for form in ["matmul", "sdpa"]:
                check_activations_of_packed_rows(tmp_path, adapter, precision, heads, form)


def test_twin_a_row_that_is_joined_where_none_is_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHORT", 0)
    with pytest.raises(AssertionError):
        check_activations_of_packed_rows(tmp_path, LORA, "fp32", 4, "matmul")


def test_attention_of_packed_rows_by_hand(tmp_path):
    """And the row of 3 072 bytes that the next layer reads."""
    for form, length, own in [
        # q, k and v of 3 072 bytes each, and a number for each of 12 heads; seen in the saved tensors of one call.
        ("matmul", 64, 9_264),
        ("matmul", 384, 9_264),
        ("matmul", 4096, 12_336),  # the outputs of single documents besides
        ("sdpa", 512, 12_336),
        ("plain", 512, 12_336 - 3_072),  # the output that it keeps is what the next layer reads
    ]:
        sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
        work = replace(workload(tmp_path, config=CONFIG | sizes), documents=form)
        assert module._attention_bytes(work, length) == own + 3_072


def test_longer_documents_count_as_without_packing(tmp_path):
    work = workload(tmp_path, attention={"flash": "off"})
    assert work.attention.expected.value == "math"
    long = module._attention_bytes(work, 4096)
    assert module._attention_bytes(replace(work, documents="matmul"), 4096) == long
    assert module._attention_bytes(replace(work, documents="matmul"), 384) < long / 4


def test_the_length_up_to_which_documents_go_by_products_is_the_kernels():
    assert module._SHORT == SHORT


def _cast_per_layer(work):
    linear = sum(part.parameters for part in work.model.layer_linears) // work.model.layers
    adapter = work.adapter.trainable // work.model.layers if work.adapter else 0
    frozen = linear if work.adapter is None or work.precision.base.value == "fp32" else 0
    return frozen + adapter


# A copy of a residual here, of a bias there is not counted, and PEFT's A x is counted once more for Conv1D.
FAMILY_TOLERANCE = 0.11


def wide(name):
    """The family at the sizes of CONFIG, with a window that does not matter and the dropout that it has by default."""
    sizes = {key: value for key, value in CONFIG.items() if key in TINY[name] and key != "model_type"}
    sizes |= {"sliding_window": 4096} if "sliding_window" in TINY[name] else {}
    sizes |= {"head_dim": 32} if "head_dim" in TINY[name] else {}
    special = {
        "opt": {"ffn_dim": 512, "word_embed_proj_dim": 128},
        "gpt2": {"n_embd": 128, "n_layer": 4, "attn_pdrop": 0.0},
        "gemma3": {"sliding_window_pattern": 6},
    }
    return TINY[name] | sizes | {"max_position_embeddings": 128} | special.get(name, {})


@pytest.mark.parametrize(
    ("adapter", "precision"),
    representatives([(None, "fp32"), (None, "bf16"), (LORA, "fp32"), (LORA, "bf16")], (None, "bf16"), (LORA, "fp32")),
)
def test_activations_of_every_family(tmp_path, adapter, precision):
    for name in TINY:
        check_activations_of_every_family(tmp_path, name, adapter, precision)


def check_activations_of_every_family(tmp_path, name, adapter, precision):
    attention, config = ("eager", "eager") if name == "gemma2" else ("flash", "sdpa"), wide(name)
    work = workload(tmp_path, adapter=adapter, precision=precision, attention=attention[1], config=config)
    kept = kept_per_layer(work, adapter, attention[0], config)
    cast_copies = work.width * (_cast_per_layer(work) if work.autocast else 0)
    assert layer_bytes(work, ROWS * TOKENS, TOKENS) == pytest.approx(kept - cast_copies, rel=FAMILY_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("opt", {"gated": True}),
        ("gpt2", {"activation": "relu"}),
        ("gemma3", {"norms": ("hidden", "hidden")}),
        ("gemma2", {"without_sdpa": ""}),
    ],
)
def test_a_fact_of_a_family_that_is_wrong_would_be_noticed(tmp_path, monkeypatch, name, change):
    right = workload
    monkeypatch.setattr(
        sys.modules[__name__],
        "workload",
        lambda *args, **kinds: (lambda work: replace(work, model=replace(work.model, **change)))(right(*args, **kinds)),
    )
    with pytest.raises(AssertionError):
        check_activations_of_every_family(tmp_path, name, LORA, "fp32")


# Indices of routed rows and rows' statistics.
MIXTURE_TOLERANCE = 0.01


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_of_a_mixture(tmp_path, precision):
    config = MIXTURE | {"hidden_size": 256, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 4}
    model = mixture(tmp_path, config)
    work = workload(tmp_path, precision=precision, config=config, model=model)
    kept = kept_per_layer(work, None, "flash", config)
    kept -= work.width * _cast_per_layer(work) if work.autocast else 0
    work = replace(work, model=as_dense(model))
    assert layer_bytes(work, ROWS * TOKENS, TOKENS) == pytest.approx(kept, rel=MIXTURE_TOLERANCE)
    twin = replace(work, model=replace(work.model, norms=("hidden", "hidden")))
    assert layer_bytes(twin, ROWS * TOKENS, TOKENS) != pytest.approx(kept, rel=MIXTURE_TOLERANCE)


def fullest(pass_):
    """Bytes at the fullest moment of a pass, above what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        pass_()
    events = found.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes))


def test_a_last_layer_of_few_rows_has_few_gradients(tmp_path):
    """Two layers, of which the last is done for one position in 32."""
    config, length = CONFIG | {"num_hidden_layers": 2}, 512
    model = build(config | {"use_cache": False}, device="cpu", attn_implementation="sdpa")
    ids = torch.zeros(ROWS, length, dtype=torch.long)
    batch = Batch(ids, ids, None, 1, (length,) * ROWS, tuple(range(ROWS)))
    last_block_path().install(model)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        measured = fullest(lambda: hidden_at(model, batch, torch.arange(0, ROWS * length, 32)).sum().backward())
    work = replace(workload(tmp_path, config=config), prunes=True, logits=False)
    plan = forecast(work, examples=ROWS, length=length, supervised=1 / 32, checkpointing=OFF, available=80 * GIB)
    assert plan.activations == pytest.approx(measured, rel=TOLERANCE)
    less = unread_bytes(work, ROWS * length * 31 // 32)
    assert plan.activations + module._BACKWARD * less > (1 + TOLERANCE) * measured  # twin: those of all rows


def test_a_forgotten_term_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_adapter_token_bytes", lambda work: 0)
    with pytest.raises(AssertionError):
        check_activations_are_what_autograd_keeps(tmp_path, DORA, "fp32", "flash")


class TestForecast:
    def of(self, folder, *, examples=1, length=2048, supervised=1.0, checkpointing=OFF, **kinds):
        work = workload(folder, config=kinds.pop("config", LLAMA31_8B), **kinds)
        return forecast(
            work,
            examples=examples,
            length=length,
            supervised=supervised,
            checkpointing=checkpointing,
            available=80 * GIB,
        )

    def test_states_of_an_8b_model(self, tmp_path):
        full = self.of(tmp_path, precision="fp32")
        assert (full.weights + full.gradients + full.optimizer) / GIB == pytest.approx(8_030_261_248 * 16 / GIB)
        lora = self.of(tmp_path, adapter={"kind": "lora", "rank": 32}, precision="bf16")
        states = lora.weights + lora.gradients + lora.optimizer
        assert states == 2 * 8_030_261_248 + (4 + 4 + 8 + 2) * 83_886_080

    def test_it_grows_with_rows_and_length_and_shrinks_with_checkpointing(self, tmp_path):
        one = self.of(tmp_path, adapter=LORA, precision="bf16")
        two = self.of(tmp_path, adapter=LORA, precision="bf16", examples=2)
        assert two.activations == pytest.approx(2 * one.activations)
        assert two.logits == 2 * one.logits
        on = Choice(True, "", "user")
        assert self.of(tmp_path, adapter=LORA, precision="bf16", checkpointing=on).activations < one.activations / 5

    def test_stored_probabilities_grow_with_the_square_of_the_length(self, tmp_path):
        short, long = (self.of(tmp_path, attention="eager", length=length).activations for length in (1024, 8192))
        fused = [self.of(tmp_path, length=length).activations for length in (1024, 8192)]
        assert fused[1] == 8 * fused[0]
        assert long > 20 * short

    def test_only_supervised_positions_have_logits(self, tmp_path):
        whole, tenth = self.of(tmp_path), self.of(tmp_path, supervised=0.1)
        assert tenth.logits == pytest.approx(whole.logits / 10, rel=1e-2)

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_a_head_that_trains_holds_its_gradient_from_the_forward_pass_on(self, tmp_path, precision):
        work = replace(workload(tmp_path, precision=precision), loss_rows=16, kind="cpu")
        head = CONFIG["vocab_size"] * CONFIG["hidden_size"]
        pieces = 16 * CONFIG["vocab_size"] * (6 if precision == "bf16" else 4)
        product = 2 * head if precision == "bf16" else 0
        assert module._logits(work, 500) == pieces + 4 * head + product
        frozen = replace(workload(tmp_path, adapter=LORA, precision=precision), loss_rows=16, kind="cpu")
        assert module._logits(frozen, 500) == pieces

    def test_what_the_chunked_loss_holds_is_what_is_counted(self, tmp_path):
        """Between forward and backward pass, in fp32: the head's gradient; and no more of it where it is frozen."""
        work = replace(workload(tmp_path), loss_rows=16)
        hidden = torch.zeros(40, CONFIG["hidden_size"], requires_grad=True)
        weight = torch.zeros(CONFIG["vocab_size"], CONFIG["hidden_size"], requires_grad=True)
        held = []
        for one in (weight, weight.detach()):
            loss = summed_loss(hidden, Head(one, None, 16), torch.zeros(40, dtype=torch.long))
            held.append(sum(found.nbytes for found in loss.grad_fn.gradients if found is not None))
        pieces = module._logits(replace(work, adapter=workload(tmp_path, adapter=LORA).adapter), 40)
        assert held[0] - held[1] == module._logits(work, 40) - pieces

    def test_gradients_of_the_first_pass_wait_through_the_others(self, tmp_path):
        """One pass: they come as activations go. The last word has either what one layer and all gradients take or all
        activations and logits, here by hand."""
        kinds = {"examples": 1, "length": 64, "supervised": 1.0, "checkpointing": OFF, "available": 80 * GIB}
        work = workload(tmp_path, precision="fp32")
        one, more = (forecast(work, **kinds, accumulation=passes) for passes in (1, 2))
        layer = layer_bytes(work, 64, 64)
        states = one.weights + one.optimizer
        assert one.total - states == max(4 * layer + one.logits, int(4.5 * layer), one.gradients + int(1.5 * layer))
        assert more.total - states == one.gradients + max(4 * layer + one.logits, int(4.5 * layer))
        assert one.total < more.total

    @pytest.mark.parametrize(
        ("holes", "trains", "length", "apart"),
        [("few", True, 16, True), ("few", True, 512, False), ("none", True, 16, False), ("few", False, 16, False)],
    )
    def test_gradients_of_experts_find_room_in_a_heap_among_larger_layers_alone(
        self, tmp_path, holes, trains, length, apart
    ):
        """Measured: docs/evidence/memory.md. On a GPU, and of an adapter, they come as activations go."""
        work = workload(tmp_path, adapter=None if trains else LORA, model=mixture(tmp_path))
        work = replace(work, model=as_dense(work.model), holes=holes)
        layer, largest = layer_bytes(work, length, length), 4 * 4 * (2 * 48) * 128  # gate and up of four experts
        assert (layer < 2.8 * largest, layer > 3.9 * largest) == (length == 16, length == 512)
        kinds = {"examples": 1, "length": length, "supervised": 1.0, "checkpointing": OFF, "available": 80 * GIB}
        one, more = (forecast(work, **kinds, accumulation=passes) for passes in (1, 2))
        assert (one.total == more.total) == apart
        assert one.total <= more.total
        if trains:  # by hand: queries, keys, values and output, four norms, router and experts; embeddings and head
            inside = 2 * 128 * 128 + 2 * 128 * 64 + 2 * 128 + 2 * 32 + 4 * 128 + 4 * 3 * 48 * 128
            numbers = 4 * inside + 2 * 64 * 128 + 128
            assert (one.weights, one.gradients, one.optimizer) == (4 * numbers, 4 * numbers, 8 * numbers)
            most = max(4 * layer + one.logits, int(4.5 * layer))
            most = one.gradients + most if apart else max(most, one.gradients + int(1.5 * layer))
            assert one.total == 12 * numbers + one.holes + most

    @pytest.mark.parametrize(
        ("adapter", "precision", "more"), [(None, "bf16", 0), (LORA, "bf16", 154 << 20), (LORA, BOTH, 0)]
    )
    def test_experts_in_16_bits_alone_need_programs(self, tmp_path, adapter, precision, more):
        work = workload(tmp_path, adapter=adapter, precision=precision, model=mixture(tmp_path))
        work = replace(work, model=as_dense(work.model), kind="cpu")
        kinds = {"examples": 1, "length": 64, "supervised": 0.5, "checkpointing": OFF, "available": 80 * GIB}
        plan, alone = (forecast(replace(work, holes="few", kind=kind), **kinds) for kind in ("cpu", "mps"))
        assert plan.holes - alone.holes == more

    def test_holes_are_a_line_of_their_own(self, tmp_path):
        kinds = {"examples": 1, "length": 64, "supervised": 1.0, "checkpointing": OFF, "available": 80 * GIB}
        work = workload(tmp_path, adapter=LORA, precision="bf16")
        without, with_holes = (forecast(replace(work, holes=holes), **kinds) for holes in ("none", "few"))
        assert without.holes == 0
        assert with_holes.total == without.total + with_holes.holes
        assert with_holes.activations == without.activations

    @pytest.mark.parametrize(
        ("varies", "precision", "kind", "more"),
        [
            (True, "bf16", "cpu", 154 << 20),
            (False, "bf16", "cpu", 0),  # few shapes
            (True, "fp32", "cpu", 0),  # no programs: products of 32 bits are another library's
            (True, "bf16", "cuda", 0),
        ],
    )
    def test_steps_of_many_sizes_in_16_bits_fill_the_places_for_programs(self, tmp_path, varies, precision, kind, more):
        work = replace(workload(tmp_path, adapter=LORA, precision=precision), varies=varies, kind=kind)
        kinds = {"examples": 1, "length": 256, "supervised": 0.5, "checkpointing": OFF, "available": 80 * GIB}
        plan = forecast(replace(work, holes="few"), **kinds)
        alone = forecast(replace(work, holes="few", kind="mps"), **kinds)
        assert plan.holes - alone.holes == more

    @pytest.mark.parametrize(
        ("products", "kind", "places"), [(0, "cpu", 0), (128, "cpu", 128), (999, "cpu", 256), (128, "cuda", 0)]
    )
    def test_steps_of_one_size_have_those_of_the_comparison_and_of_a_tower(self, tmp_path, products, kind, places):
        work = replace(workload(tmp_path, adapter=LORA, precision="bf16"), products=products, kind=kind, holes="few")
        kinds = {"examples": 1, "length": 256, "supervised": 0.5, "checkpointing": OFF, "available": 80 * GIB}
        plan, alone = (forecast(one, **kinds) for one in (work, replace(work, kind="mps")))
        assert plan.holes - alone.holes == (154 << 20) * places // 256

    def test_blocks_of_the_system_leave_no_holes(self, tmp_path):
        kinds = {"length": 4096, "supervised": 0.0, "checkpointing": OFF, "available": 80 * GIB}
        work = replace(workload(tmp_path, adapter=LORA, precision="bf16", config=LLAMA31_8B), holes="few")
        left = module._HOLES["few"].left
        assert forecast(work, examples=1, **kinds).holes == left
        assert forecast(work, examples=1, **kinds | {"length": 256}).holes > left

    @pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
    @pytest.mark.parametrize(
        ("holes", "varies", "left", "of_layer", "of_kept"),
        [
            ("few", False, 40, 1.0, 0.1),
            ("few", True, 40 + 154, 1.0, 0.1),  # and programs
            ("many", False, 32, 3.4, 0.1),
            ("many", True, 32 + 154, 3.4, 0.1),
        ],
    )
    def test_holes_by_hand(self, tmp_path, holes, varies, left, of_layer, of_kept, again):
        """Per layer and by what is kept, whether layers are computed again or not."""
        work = workload(tmp_path, adapter=LORA, precision="bf16")
        work = replace(work, holes=holes, varies=varies, loss_rows=16, kind="cpu")
        kinds = {"examples": ROWS, "length": 96, "supervised": 1.0, "available": 80 * GIB}
        plan = forecast(work, checkpointing=Choice(again, "", "user"), **kinds)
        layer = layer_bytes(work, ROWS * 96, 96)
        logits = 16 * CONFIG["vocab_size"] * (2 + 4)
        assert plan.logits == logits
        assert plan.holes - (left << 20) == pytest.approx(of_layer * layer + of_kept * plan.activations)

    @pytest.mark.parametrize("name", ["left", "of_layer", "of_kept"])
    def test_twin_a_kind_of_holes_left_out_would_be_noticed(self, tmp_path, monkeypatch, name):
        monkeypatch.setitem(module._HOLES, "few", replace(module._HOLES["few"], **{name: 0}))
        with pytest.raises(AssertionError):
            self.test_holes_by_hand(tmp_path, "few", False, 40, 1.0, 0.1, True)

    def test_logits_leave_none(self, tmp_path):
        """Each piece has the place of the one before."""
        work = replace(workload(tmp_path, precision="fp32"), holes="few", kind="cpu")
        kinds = {"examples": 1, "length": 16, "supervised": 1.0, "checkpointing": OFF, "available": 80 * GIB}
        few, many = (forecast(replace(work, loss_rows=rows), **kinds) for rows in (8, 16))
        assert many.logits > few.logits
        assert many.holes == few.holes

    def test_what_fits_leaves_room(self, tmp_path):
        plan = self.of(tmp_path, adapter=LORA, precision="bf16")
        assert fits(plan)
        assert usable(80 * GIB) < 0.9 * 80 * GIB


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_our_adapter_arithmetic_holds_a_copy_of_its_matrices_from_step_to_step(tmp_path, kind, precision):
    """They outlive the backward pass: at rank 1000 and 384 wide they were the fifth that the forecast lacked."""
    work = replace(workload(tmp_path, adapter={"kind": kind, "rank": 64}, precision=precision), fast_adapter=True)
    model = build(CONFIG | {"use_cache": False}, device="cpu", attn_implementation="sdpa")
    adapted = get_peft_model(model, LoraConfig(r=64, target_modules="all-linear", use_dora=kind == "dora"))
    adapter_path().install(adapted)
    # Held, not only their ids: a freed one's id may come back as a new one's.
    before = [one for one in gc.get_objects() if isinstance(one, _Made)]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        adapted(input_ids=torch.zeros(2, 8, dtype=torch.long)).logits.sum().backward()
    made = [one for one in gc.get_objects() if isinstance(one, _Made) and not any(one is other for other in before)]
    held = sum(tensor.nbytes for one in made for tensor in (one.stacked, *one.up))
    assert module.adapter_copies(work) == held > 0
    assert module.adapter_copies(replace(work, fast_adapter=False)) == 0  # twin: PEFT's own has none
    weights, without = (
        forecast(one, examples=1, length=8, supervised=1.0, checkpointing=OFF, available=GIB).weights
        for one in (work, replace(work, fast_adapter=False))
    )
    assert weights - without == (held if precision == "fp32" else 0)  # under autocast they were cast copies before
