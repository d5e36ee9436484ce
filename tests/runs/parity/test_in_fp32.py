"""What 16 bits hide is seen in fp32 before step 1, and what rounds as the plain way does is not taken out for it."""

import json
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from helpers.architectures import GEMMA3, LLAMA, OPT, build
from helpers.growing_records import sky_workplace
from helpers.path_runs import WEIGHTS, path_config, start, weights
from helpers.path_runs import fast_paths as found_paths
from helpers.plans import precision_plan
from helpers.tiers import representatives
from helpers.tiny_models import llama3_tokenizer
from surefoot.methods.losses import sft
from surefoot.models.decoder import decoder_layers, few_layers
from surefoot.models.fast import adapters as fast_adapters
from surefoot.models.fast import pointwise as fast_pointwise
from surefoot.models.precision import exact_products, widened
from surefoot.planning.plan import Choice, ParallelPlan
from surefoot.runs.parity import fast_paths, in_fp32
from surefoot.runs.parity.differences import LIMITS
from surefoot.runs.parity.in_fp32 import LIMIT

BY_LITTLE = 1.02
PAIR = ("prompt", "chosen", "rejected")
BEYOND = (0,)  # seeds of OPT as a reward model with which rounding alone passes the limit of bf16


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return sky_workplace(tmp_path_factory, 16, hidden=64)


def train(workplace, output, mode="new", **way):
    """What is told, what environment.json has of the paths, and the weights."""
    usual = {"batch": {"size": 8, "micro": 4}, "precision": "bf16"}
    said = start(path_config(workplace, output, **(usual | way)), mode)
    return said, found_paths(output), weights(output)


def without_fp32(monkeypatch):
    monkeypatch.setattr(fast_paths, "check_in_fp32", lambda *_: in_fp32.Fp32Check())


def scaled(monkeypatch):
    """An adapter's scale is too large by a fiftieth."""
    real = fast_adapters._Adapter

    def wrong(name, a, b, magnitude, scale, dropout, drops):
        return real(name, a, b, magnitude, BY_LITTLE * scale, dropout, drops)

    monkeypatch.setattr(fast_adapters, "_Adapter", wrong)


def longer(monkeypatch):
    """The loss is right, and the gradient that it sends back through the head a fiftieth too large."""
    real = sft.summed_loss

    def wrong(*given):
        loss = real(*given)
        return loss + (BY_LITTLE - 1) * (loss - loss.detach())

    monkeypatch.setattr(sft, "summed_loss", wrong)


def wide_norms(monkeypatch):
    """What a norm computes is a fiftieth too large."""
    wide = partial(fast_pointwise.install, norm=lambda *given: fast_pointwise.rms_norm(*given) * BY_LITTLE)
    monkeypatch.setattr(fast_pointwise, "install", wide)


# Of each the adapter of the run, and the path that it is planted in.
PLANTED = {
    "lora": (scaled, "lora", "adapter"),
    "dora": (scaled, "dora", "adapter"),
    "head": (longer, "lora", "loss"),
    "norms": (wide_norms, "lora", "pointwise"),
}


@pytest.fixture
def fused(monkeypatch):
    """Norms go by the fast path although they are narrow, and nobody asked for it by name."""
    real = fast_paths.planned_paths

    def planned(plan, rows=None):
        kernels = replace(plan.kernels, pointwise=replace(plan.kernels.pointwise, value="fused"))
        return real(plan if plan.kernels.pointwise.source == "user" else replace(plan, kernels=kernels), rows)

    monkeypatch.setattr(fast_paths, "planned_paths", planned)


@pytest.mark.parametrize("name", representatives(PLANTED, "head"))
@pytest.mark.usefixtures("fused")
def test_a_fiftieth_too_much_is_taken_out_of_a_run_in_16_bits_which_is_then_the_plain_one(
    workplace, tmp_path, monkeypatch, name
):
    plant, kind, path = PLANTED[name]
    adapter = {"kind": kind, "rank": 4}
    _, _, plain = train(workplace, tmp_path / "plain", adapter=adapter, kernels={path: "plain"})
    plant(monkeypatch)
    screen, found, weights = train(workplace, tmp_path / "run", adapter=adapter)
    assert {one for one, record in found.items() if not record["used"]} == {path}
    assert found[path]["fp32"]["differs"] > LIMIT == found[path]["fp32"]["limit"]
    assert f"caution: kernels.{path}" in screen
    assert weights == plain
    without_fp32(monkeypatch)  # twin: 16 bits by themselves hide it
    _, found, weights = train(workplace, tmp_path / "hidden", adapter=adapter)
    assert found[path]["used"]
    assert weights != plain


WAYS = {
    "lora": {},
    "dora, packed": {"adapter": {"kind": "dora", "rank": 4}, "data": {"packing": "on"}},
    "dropout": {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}},
    "fp16": {"precision": "fp16"},
    "full": {"adapter": None},
}


@pytest.mark.parametrize("way", representatives(WAYS, "dora, packed"))
def test_a_run_that_was_looked_at_is_the_run_that_nobody_looked_at(workplace, tmp_path, monkeypatch, way):
    seen, entered = [], []
    real = in_fp32.compare_formulas
    monkeypatch.setattr(in_fp32, "compare_formulas", lambda *given: seen.append(real(*given)) or seen[-1])
    monkeypatch.setattr(in_fp32, "wide_context", lambda device: entered.append(device.type) or nullcontext())

    def trained(name):
        usual = {"precision": "bf16", "batch": {"size": 8, "micro": 4}, "duration": "3 steps"}
        start(path_config(workplace, tmp_path / name, **(usual | WAYS[way])))
        return weights(tmp_path / name, WEIGHTS if WAYS[way].get("adapter", 1) else "model.safetensors")

    looked = trained("looked")
    assert len(seen) == 1
    assert set(entered) == {"cpu"}
    assert seen[0].compared
    assert not seen[0].wrong
    assert seen[0].error < LIMIT / 50
    without_fp32(monkeypatch)
    assert looked == trained("other")
    assert len(seen) == 1


def opt_as_reward(folder, seed):
    folder.mkdir()
    llama3_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    keys = {key: value for key, value in OPT.items() if key != "model_type"} | {"vocab_size": len(tokenizer)}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    torch.manual_seed(seed)
    OPTForCausalLM(OPTConfig(**keys | ends | {"max_position_embeddings": 512, "dropout": 0.0})).save_pretrained(folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A folder with short pairs of random words."""
    draws, folder = random.Random(0), tmp_path_factory.mktemp("pairs")
    words = "the answer to question is written here give three tips for staying healthy below".split()  # noqa: SIM905

    def say():
        return " ".join(draws.choices(words, k=draws.randint(2, 8)))

    (folder / "pairs.json").write_text(json.dumps([{key: say() for key in PAIR} for _ in range(64)]))
    return folder


def reward(pairs, output, seed):
    """What environment.json has of the paths of a reward model."""
    base = output.with_name(f"base-{seed}")
    opt_as_reward(base, seed)
    ways = {
        "stage": "reward",
        "precision": "bf16",
        "batch": {"size": 8, "micro": 4},
        "duration": "1 step",
        "seed": seed,
    }
    start(path_config(pairs, output, rows="pairs.json", base=str(base), data={"max_length": 256}, **ways))
    return found_paths(output)


@pytest.mark.parametrize(
    "seeds", [pytest.param(BEYOND, id="one"), pytest.param(range(12), id="twelve", marks=pytest.mark.slow)]
)
def test_reward_models_with_relus_keep_paths_that_round_as_the_plain_way_does(pairs, tmp_path, seeds):
    found = [reward(pairs, tmp_path / f"run-{seed}", seed) for seed in seeds]
    assert all(one["used"] for paths in found for one in paths.values())
    beyond = [one for paths in found for one in paths.values() if one["differs"]["gradient"] > LIMITS["bf16"]]
    assert beyond
    assert all("from_fp32" in one and not one["outside"] for one in beyond)


def test_twin_by_the_limit_alone_one_of_them_is_taken_out(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(fast_paths, "rounds_as_plain", lambda *_: {})
    assert not all(one["used"] for one in reward(pairs, tmp_path / "run", 0).values())


def only_16_bits(monkeypatch):
    """Half as large again where products are in 16 bits, and right in fp32."""
    real = fast_adapters._up

    def wrong(adapter, dtype):
        found = real(adapter, dtype)
        return found * 1.5 if dtype == torch.bfloat16 else found

    monkeypatch.setattr(fast_adapters, "_up", wrong)


def test_a_fault_of_16_bits_alone_is_not_excused_by_fp32(workplace, tmp_path, monkeypatch):
    only_16_bits(monkeypatch)
    asked = []
    real = in_fp32.rounds_as_plain
    monkeypatch.setattr(fast_paths, "rounds_as_plain", lambda *given: asked.append(real(*given)) or asked[-1])
    screen, found, _ = train(workplace, tmp_path / "run")
    assert found["adapter"]["fp32"]["differs"] < LIMIT
    assert not found["adapter"]["used"]
    assert "caution: kernels.adapter" in screen
    assert found["adapter"]["differs"]["gradient"] > LIMITS["bf16"]
    assert asked
    assert not any(asked)


def test_a_resumed_run_keeps_a_path_that_fp32_shows_to_be_wrong_and_says_so(workplace, tmp_path, monkeypatch):
    train(workplace, tmp_path / "run", duration="1 step")
    scaled(monkeypatch)
    screen, found, _ = train(workplace, tmp_path / "run", "resume", duration="2 steps")
    assert "caution: kernels.adapter" in screen
    assert (found["adapter"]["used"], found["adapter"]["outside"]) == (True, True)
    assert found["loss"]["outside"] is False  # twin


def test_where_fp32_has_no_room_16_bits_decide_and_it_is_said(workplace, tmp_path, monkeypatch):
    monkeypatch.setattr(in_fp32, "usable", lambda available: 0)
    scaled(monkeypatch)
    _, found, _ = train(workplace, tmp_path / "run")
    assert found["adapter"]["used"]
    assert found["adapter"]["fp32"].keys() == {"unseen"}


def test_a_run_in_fp32_is_not_looked_at_twice(workplace, tmp_path):
    _, found, _ = train(workplace, tmp_path / "run", precision="fp32")
    assert all("fp32" not in one for one in found.values())


@pytest.mark.parametrize(
    ("engine", "stage", "base", "why"),
    [
        ("fsdp2", None, "bf16", "fsdp2"),
        ("deepspeed", 3, "bf16", "deepspeed"),
        ("ddp", None, "nf4", "nf4"),
        ("ddp", None, "int8", "int8"),
    ],
)
def test_what_cannot_go_in_fp32(engine, stage, base, why):
    parallel = ParallelPlan(Choice(engine, "", "user"), zero_stage=stage)
    plan = SimpleNamespace(precision=precision_plan("bf16", base), parallel=parallel, adapter=None)
    assert why in in_fp32._unsuited(plan)


def test_under_zero_2_weights_are_whole():
    parallel = ParallelPlan(Choice("deepspeed", "", "user"), zero_stage=2)
    plan = SimpleNamespace(precision=precision_plan("bf16", "bf16"), parallel=parallel, adapter=None)
    assert not in_fp32._unsuited(plan)


def test_tensors_are_widened_to_the_same_numbers_and_the_very_memory_is_back_also_after_a_failure():
    model = torch.nn.Linear(4, 3).bfloat16()
    tensors = list(model.parameters())
    before = [(one.data_ptr(), one.clone()) for one in tensors]

    def fail():
        with widened(tensors):
            for one, (_, own) in zip(tensors, before, strict=True):
                assert one.dtype == torch.float32
                assert torch.equal(one, own.float())
                one.data.add_(1)  # what is written there is not kept
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    for one, (place, own) in zip(tensors, before, strict=True):
        assert (one.data_ptr(), one.dtype) == (place, torch.bfloat16)
        assert torch.equal(one, own)


def test_products_are_in_fp32_where_tf32_was_allowed():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with exact_products():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(("family", "layers", "kept"), [(LLAMA, 5, [0, 4]), (GEMMA3, 6, [0, 1, 5]), (LLAMA, 1, [0])])
def test_a_decoder_of_few_layers_has_one_of_each_make_and_the_last(family, layers, kept):
    model = build(family | {"num_hidden_layers": layers}, device="cpu")
    own = list(decoder_layers(model))
    names = list(model.state_dict())
    with few_layers(model):
        assert [own.index(one) for one in decoder_layers(model)] == kept
        model(input_ids=torch.arange(8).unsqueeze(0), use_cache=False)
    assert list(decoder_layers(model)) == own
    assert list(model.state_dict()) == names


def test_a_layer_with_an_adapter_is_of_another_make():
    model = build(LLAMA | {"num_hidden_layers": 5}, device="cpu")
    layer = decoder_layers(model)[2]
    layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj)
    with few_layers(model):
        assert [one is layer for one in decoder_layers(model)] == [False, True, False]
