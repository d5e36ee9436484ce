"""Which types a run gets, by request, machine and measurement.

nf4, int8: what they weigh, against bitsandbytes itself, and what they refuse.

What a plan makes of precision.qat, and what it refuses before anything is loaded.
"""

import dataclasses
import functools
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.faults import gives
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from helpers.plans import adapter_plan, attention_plan, precision_plan
from surefoot.config.contradictions import contradictions
from surefoot.families import find
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.models.precision import is_quantized, quantize
from surefoot.planning import memory
from surefoot.planning import precision as module
from surefoot.planning.measurements import Measurements
from surefoot.planning.notes import Notes
from surefoot.planning.plan import plan_from_json, plan_to_json
from surefoot.planning.precision import NARROW, check_packed_base, plan_precision, tf32_is_open
from surefoot.planning.resolve import resolve
from surefoot.planning.workload import Workload
from surefoot.system.errors import InputError
from surefoot.system.hardware import Hardware, preset

LAPTOP, H100 = preset("cpu"), preset("h100")
AMX = Hardware("Xeon", "cpu", 2**34, None, bf16=True, fp16=False, tf32=False, cores=2, preset=False)
T4 = Hardware("Tesla T4", "cuda", 2**34, (7, 5), bf16=False, fp16=True, tf32=False, cores=4, preset=False)
FULL, ADAPTER = True, False


@functools.cache
def facts():
    """Of an 8B Llama."""
    with tempfile.TemporaryDirectory() as folder:
        return model_facts(Path(folder), LLAMA31_8B)


def decide(request="auto", *, full=ADAPTER, width=4096, hardware=H100, products=None, tf32=None, environment=None):
    """What `resolve` does: the config's own contradictions, then the policy."""
    notes = Notes()
    config = run_config(precision=request, **({"adapter": None} if full else {}))
    for problem in contradictions(config):
        notes.refuse(problem.key, problem.what, problem.fix)
    model = dataclasses.replace(facts(), hidden=width)
    seen = Measurements(products=products or {}, tf32=tf32)
    return plan_precision(config, model, hardware, seen, environment or {}, notes), notes


def keys(notes):
    return [fault.where for fault in notes.faults]


def test_no_request_ends_with_a_scaler_over_fp16_trainables():
    """Seed 003: "Attempting to unscale FP16 gradients". Either the plan is sound or the run is refused."""
    for hardware in [LAPTOP, AMX, T4, H100]:
        for full in [FULL, ADAPTER]:
            types = ("auto", "fp32", "bf16", "fp16")
            for compute, base in itertools.product(types, types):
                plan, notes = decide({"compute": compute, "base": base}, full=full, hardware=hardware)
                assert plan.trainable.value == "fp32"
                assert plan.scaler.value == (plan.compute.value == "fp16")
                if full and not notes.faults:
                    assert plan.base.value == "fp32"
                for asked, chosen in ((compute, plan.compute.value), (base, plan.base.value)):
                    assert asked in ("auto", chosen) or notes.faults, "replaced without a word"


def test_fp16_weights_in_full_fine_tuning_are_refused_with_the_words_of_the_crash():
    _, notes = decide({"base": "fp16"}, full=FULL)
    assert keys(notes) == ["precision.base"]
    assert gives(notes.faults[0].what, "FP16")  # as in torch's own words
    assert "`precision: fp16`" in notes.faults[0].fix
    assert not decide({"base": "fp16"}, full=ADAPTER)[1].faults  # a frozen base may be fp16


def test_choice_without_measurements():
    for request_, hardware, full, compute, base, source in [
        ("auto", H100, ADAPTER, "bf16", "bf16", "hardware"),
        ("auto", H100, FULL, "bf16", "fp32", "hardware"),
        ("auto", LAPTOP, ADAPTER, "fp32", "fp32", "hardware"),
        ("auto", AMX, ADAPTER, "bf16", "bf16", "hardware"),
        ("auto", T4, ADAPTER, "fp32", "fp32", "hardware"),
        ("fp16", T4, ADAPTER, "fp16", "fp16", "user"),
        ("fp16", T4, FULL, "fp16", "fp32", "user"),
        ("fp32", H100, ADAPTER, "fp32", "fp32", "user"),
        ({"compute": "bf16", "base": "fp32"}, H100, ADAPTER, "bf16", "fp32", "user"),
        ({"base": "bf16"}, LAPTOP, ADAPTER, "bf16", "bf16", "user"),
        ({"base": "fp32"}, H100, ADAPTER, "bf16", "fp32", "hardware"),
    ]:
        plan, notes = decide(request_, hardware=hardware, full=full)
        assert not notes.faults
        assert (plan.compute.value, plan.base.value, plan.compute.source) == (compute, base, source)


def test_the_default_is_left_only_for_a_clear_gain():
    fast = decide(hardware=AMX, products={"fp32": 1e11, "bf16": 1.6e11})[0].compute
    close = decide(hardware=AMX, products={"fp32": 1e11, "bf16": 1.4e11})[0].compute
    assert (fast.value, fast.source) == ("bf16", "measured")
    assert (close.value, close.source) == ("fp32", "measured")
    assert "1.6 times" in fast.reason


def test_a_lower_bar_would_be_noticed(monkeypatch):
    monkeypatch.setattr(module, "_PRODUCT_GAIN", 1.0)
    with pytest.raises(AssertionError):
        test_the_default_is_left_only_for_a_clear_gain()


def test_what_was_measured_beats_what_the_processor_says_of_itself():
    slow = {"fp32": 2e11, "bf16": 4e8}
    assert decide(hardware=AMX, products=slow)[0].compute.value == "fp32"


def test_a_narrow_model_on_a_cpu_keeps_the_default_whatever_is_measured():
    fast = {"fp32": 1e11, "bf16": 9e11}
    assert decide(hardware=AMX, width=NARROW - 1, products=fast)[0].compute.value == "fp32"
    assert decide(hardware=AMX, width=NARROW, products=fast)[0].compute.value == "bf16"
    assert decide(hardware=H100, width=NARROW - 1)[0].compute.value == "bf16"


class TestExplicitTypes:
    def test_bf16_that_the_gpu_lacks_is_refused(self):
        _, notes = decide("bf16", hardware=T4)
        assert keys(notes) == ["precision.compute"]
        assert "capability 8.0" in str(notes.faults[0])

    def test_bf16_that_is_slow_is_honoured_with_the_figure(self):
        plan, notes = decide("bf16", hardware=LAPTOP, products={"fp32": 2e11, "bf16": 5e8})
        assert plan.compute.value == "bf16"
        assert "400.0" in notes.cautions[0]
        assert not decide("bf16", hardware=LAPTOP, products={"fp32": 1.02e11, "bf16": 1e11})[1].cautions

    def test_unmeasured_it_is_told_by_the_instructions(self):
        assert "no instructions" in decide("bf16", hardware=LAPTOP)[1].cautions[0]
        assert not decide("bf16", hardware=AMX)[1].cautions
        assert not decide("fp32", hardware=LAPTOP)[1].cautions

    def test_products_of_16_bit_weights_cannot_be_wider_or_of_the_other_type(self):
        for compute, base in (("fp32", "bf16"), ("bf16", "fp16")):
            assert keys(decide({"compute": compute, "base": base})[1]) == ["precision.base"]


class TestTf32:
    def test_it_follows_the_compute_type(self):
        assert decide("bf16")[0].tf32.value is True
        assert decide("fp32")[0].tf32.value is False

    @pytest.mark.parametrize(("gain", "on"), [(6.0, True), (1.6, True), (1.4, False), (1.0, False)])
    def test_beside_16_bit_products_it_is_on_where_it_was_seen_to_gain(self, gain, on):
        choice = decide("bf16", products={"fp32": 5e13, "bf16": 8e14}, tf32=gain * 5e13)[0].tf32
        assert (choice.value, choice.source) == (on, "measured")
        assert gives(choice.reason, f"{gain:.1f}")

    def test_a_lower_bar_would_be_noticed(self, monkeypatch):
        monkeypatch.setattr(module, "_TF32_GAIN", 1.0)
        with pytest.raises(AssertionError):
            self.test_beside_16_bit_products_it_is_on_where_it_was_seen_to_gain(1.4, False)

    @pytest.mark.parametrize("gain", [1.0, 8.0])
    def test_fp32_products_stay_whole_and_the_gain_is_told_with_its_key(self, gain):
        choice = decide("fp32", products={"fp32": 5e13}, tf32=gain * 5e13)[0].tf32
        assert (choice.value, choice.source) == (False, "default")
        assert [gives(choice.reason, one) for one in (f"{gain:.1f}", "precision.tf32")] == [True, True]
        assert "here" not in decide("fp32")[0].tf32.reason  # nobody measured

    def test_without_the_rate_of_fp32_a_rate_says_nothing(self):
        assert decide("bf16", tf32=4e14)[0].tf32.source == "default"

    def test_it_is_measured_where_that_decides_or_tells_something(self):
        auto = run_config().precision
        assert tf32_is_open(auto, H100, {})
        assert not tf32_is_open(auto, T4, {})
        assert not tf32_is_open(auto, H100, {"NVIDIA_TF32_OVERRIDE": "1"})
        assert not tf32_is_open(run_config(precision={"tf32": "on"}).precision, H100, {})

    def test_what_is_asked_for_wins(self):
        assert decide({"compute": "fp32", "tf32": "on"})[0].tf32.value is True
        assert decide({"compute": "bf16", "tf32": "off"})[0].tf32.value is False
        assert decide({"compute": "bf16", "tf32": "off"}, products={"fp32": 1e13}, tf32=1e14)[0].tf32.value is False

    def test_a_machine_without_it_refuses_on(self):
        assert keys(decide({"tf32": "on"}, hardware=LAPTOP)[1]) == ["precision.tf32"]
        assert not decide({"tf32": "off"}, hardware=LAPTOP)[1].faults

    def test_the_override_below_torch_is_followed_or_refused(self):
        forced_off = {"NVIDIA_TF32_OVERRIDE": "0"}
        assert decide("bf16", environment=forced_off)[0].tf32.value is False
        assert keys(decide({"tf32": "on"}, environment=forced_off)[1]) == ["precision.tf32"]
        assert not decide({"tf32": "off"}, environment=forced_off)[1].faults
        assert decide("bf16", environment={"NVIDIA_TF32_OVERRIDE": "maybe"})[0].tf32.value is True


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
# Tables of a few hundred bytes per layer are left out of the forecast.
TABLES = 1e-3


def frozen_bytes(folder, base):
    model = model_facts(folder, LLAMA31_8B | SIZES)
    adapter, precision = adapter_plan(["q_proj"]), precision_plan("bf16", base)
    return memory._frozen_bytes(Workload(model, precision, attention_plan(), adapter, 0, model.parameters, 0))


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_packed_base_takes_what_bitsandbytes_holds(tmp_path, base):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    quantize(model, base, compute=torch.bfloat16, device=torch.device("cpu"))
    held = sum(parameter.nbytes for parameter in model.parameters())
    for name in [name for name, layer in model.named_modules() if is_quantized(layer)]:
        weight = model.get_submodule(name).weight
        if base == "nf4":
            held += weight.quant_state.absmax.nbytes + weight.quant_state.state2.absmax.nbytes
        else:
            held += weight.SCB.nbytes
    dequantized = 128 * 352 * 2  # the largest matrix, for its product
    assert frozen_bytes(tmp_path, base) == pytest.approx(held + dequantized, rel=TABLES)
    other, share = ("int8", 0.8) if base == "nf4" else ("bf16", 0.9)
    assert frozen_bytes(tmp_path, base) < share * frozen_bytes(tmp_path, other)  # twin: not the size of more bits


def faults(model, *saved):
    notes = Notes()
    check_packed_base("int8", model, adapter_plan(["q_proj"], modules_to_save=saved), notes)
    return [(fault.where, fault.what) for fault in notes.faults]


def test_transposed_layers_are_refused(tmp_path):
    llama = model_facts(tmp_path, LLAMA31_8B)
    assert faults(llama) == []
    ((where, what),) = faults(dataclasses.replace(llama, family=find("gpt2"), model_type="gpt2"))
    assert where == "precision.base"
    assert "gpt2" in what


def test_packed_layers_cannot_train_in_full(tmp_path):
    llama = model_facts(tmp_path, LLAMA31_8B)
    assert faults(llama, "lm_head", "norm") == []
    ((where, what),) = faults(llama, "up_proj")
    assert where == "adapter.modules_to_save"
    assert gives(what, "up_proj")


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_without_an_adapter_nothing_could_train(base):
    (problem,) = contradictions(run_config(adapter=None, precision={"base": base}))
    assert problem.key == "precision.base"
    assert contradictions(run_config(precision={"base": base})) == []


def test_noise_and_compile_exclude_each_other():
    (problem,) = contradictions(run_config(optim={"neftune_alpha": 5.0}, compile="default"))
    assert problem.key == "optim.neftune_alpha"
    assert contradictions(run_config(optim={"neftune_alpha": 5.0})) == []


LORA = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = model_facts(folder, LLAMA31_8B), read_tokenizer_facts(llama3_tokenizer(folder))
    roomy = dataclasses.replace(preset("h100"), memory=2**40)

    def plan(qat, facts=None, odd=None, **request):
        facts = dataclasses.replace(model, **(facts or {}))
        if odd:  # one more linear layer, of this shape
            like = next(one for one in model.modules if one.in_layer and one.linear)
            facts = dataclasses.replace(facts, modules=(*model.modules, dataclasses.replace(like, linear=odd)))
        config = run_config(precision={"compute": "bf16"} | qat, **request)
        return resolve(config, facts, tokenizer, roomy, measurements=None, environment={})

    return plan


def refused(plan, *args, **request):
    with pytest.raises(InputError) as caught:
        plan(*args, **request)
    return [fault.where for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("qat", "group"),
    [
        ({"qat": "int4"}, 32),
        ({"qat": "int8-int4", "qat_group_size": 256}, 256),
        ({"qat": "int8"}, None),
        ({"qat": "nvfp4"}, 16),
        ({"qat": "mxfp4"}, 32),
    ],
)
def test_the_plan_says_what_is_rounded(plan, qat, group):
    found = plan(qat, adapter=None)
    assert (found.precision.qat.value, found.precision.qat_group) == (qat["qat"], group)
    assert found.precision.qat.source == "user"
    assert [gives(found.precision.qat.reason, one) for one in ("6,979,321,856", 224)] == [True, True]  # weights, layers
    assert plan_from_json(plan_to_json(found)) == found
    assert found.memory.total > plan({}, adapter=None).memory.total


def test_without_it_nothing_is_rounded_and_older_plans_read(plan):
    found = plan({}, adapter=None)
    assert (found.precision.qat.value, found.precision.qat_group) == ("off", None)
    saved = plan_to_json(found)
    del saved["precision"]["qat"], saved["precision"]["qat_group"]
    older = plan_from_json(saved).precision
    assert (older.qat.value, older.qat_group) == ("off", None)


def test_the_adapters_own_kernels_would_pass_the_rounding_by(plan):
    kernels = plan({"qat": "int4"}, adapter=LORA).kernels
    assert kernels.adapter.value == "plain"
    assert plan({}, adapter=LORA).kernels.adapter.value == "fast"
    assert refused(plan, {"qat": "int4"}, adapter=LORA, kernels={"adapter": "fast"}) == ["kernels.adapter"]


@pytest.mark.parametrize(
    ("request_", "facts", "where"),
    [
        ({"adapter": None}, {"family": find("gpt2"), "model_type": "gpt2"}, "precision.qat"),
        ({"adapter": None}, {"active": 2}, "precision.qat"),
        ({"adapter": LORA | {"kind": "dora"}}, {}, "precision.qat"),
        ({"adapter": LORA | {"modules_to_save": ["up_proj"]}}, {}, "adapter.modules_to_save"),
        ({"adapter": None, "parallel": {"engine": "deepspeed"}}, {}, "precision.qat"),
    ],
)
def test_what_was_not_tried_is_refused(plan, request_, facts, where):
    assert where in refused(plan, {"qat": "int4"}, facts, **request_)


def test_groups_have_to_divide_the_inputs(plan):
    assert refused(plan, {"qat": "int4", "qat_group_size": 24}, adapter=None) == ["precision.qat_group_size"]


@pytest.mark.parametrize(
    ("shape", "forms"), [((24, 32), ["nvfp4", "mxfp4"]), ((48, 32), ["mxfp4"]), ((64, 24), ["nvfp4"])]
)
def test_blocks_have_to_divide_the_inputs_and_nvfp4_the_outputs(plan, shape, forms):
    for form in ("nvfp4", "mxfp4"):
        if form in forms:
            assert refused(plan, {"qat": form}, odd=shape, adapter=None) == ["precision.qat"]
        else:
            assert plan({"qat": form}, odd=shape, adapter=None).precision.qat.value == form


def test_the_plan_says_when_rounding_starts(plan):
    found = plan({"qat": "nvfp4", "qat_after": 1000}, adapter=None)
    assert found.precision.qat_after == 1000
    assert gives(found.precision.qat.reason, "1,000")
    assert plan_from_json(plan_to_json(found)) == found


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"precision": {"qat_group_size": 64}}, ["precision.qat_group_size"]),
        ({"precision": {"qat": "int8", "qat_group_size": 64}}, ["precision.qat_group_size"]),
        ({"precision": {"qat": "int4", "base": "nf4"}}, ["precision.qat"]),
        ({"precision": {"qat": "int4"}, "compile": "default"}, ["precision.qat"]),
        ({"precision": {"qat": "int4"}, "adapter": LORA | {"publish": "merged"}}, ["adapter.publish"]),
        ({"precision": {"qat": "int4"}, "stage": "kto"}, ["precision.qat"]),
        ({"precision": {"qat": "int4", "qat_group_size": 64}}, []),
        ({"precision": {"qat": "nvfp4", "qat_group_size": 16}}, ["precision.qat_group_size"]),
        ({"precision": {"qat_after": 5}}, ["precision.qat_after"]),
        ({"precision": {"qat": "int4", "qat_after": 5}, "stage": "dpo"}, ["precision.qat_after"]),
        ({"precision": {"qat": "int4", "qat_after": 5}, "sft": {"loss": "asft"}}, ["precision.qat_after"]),
        ({"precision": {"qat": "int4", "qat_after": 5}, "stage": "dpo", "alignment": {"loss": "orpo"}}, []),
        ({"precision": {"qat": "mxfp4", "qat_after": 5}}, []),
    ],
)
def test_keys_that_exclude_each_other(sections, keys):
    assert [problem.key for problem in contradictions(run_config(**sections))] == keys
