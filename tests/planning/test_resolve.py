"""Whole plans: a table of decisions over machine, model and request; and all conflicts at once."""

import dataclasses
import subprocess
import sys

import pytest

from helpers.model_layouts import (
    LLAMA2_7B,
    LLAMA31_8B,
    LLAMA32_1B,
    llama2_tokenizer,
    llama3_tokenizer,
    model_facts,
    run_config,
)
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning import resolve as module
from surefoot.planning.measurements import AttentionTrial, LengthFacts, Measurements
from surefoot.planning.resolve import resolve
from surefoot.system.errors import InputError
from surefoot.system.hardware import Hardware, preset

SMALL = LLAMA32_1B | {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 8}
NARROW = SMALL | {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
DROPPING = SMALL | {"attention_dropout": 0.1}
AMX = Hardware("Xeon with AMX", "cpu", 24 * 2**30, None, True, False, False, 2, preset=False)
T4 = Hardware("Tesla T4", "cuda", 15 * 2**30, (7, 5), False, True, False, 4, preset=False)
FAST_BF16 = Measurements(products={"fp32": 2e11, "bf16": 1.2e12})
SLOW_BF16 = Measurements(products={"fp32": 2e11, "bf16": 5e8})
EAGER_WINS = Measurements(
    products={"fp32": 2e11, "bf16": 5e8},
    attention=(AttentionTrial("flash", 0.02, ""), AttentionTrial("eager", 0.01, "")),
    attention_dtype="fp32",
    attention_length=256,
)
DATA = {"train": "unused.jsonl", "max_length": 512}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "3.0": read_tokenizer_facts(llama3_tokenizer(folder / "30")),
        "3.1": read_tokenizer_facts(llama3_tokenizer(folder / "31", pad=True)),
        "chat": read_tokenizer_facts(llama3_tokenizer(folder / "chat", pad=True, chat=True)),
        "2": read_tokenizer_facts(llama2_tokenizer(folder / "2")),
    }


@pytest.fixture
def decide(tmp_path, tokenizers):
    def decide(config, tokenizer, machine, request=None, measurements=None, environment=None):
        machine = preset(machine) if isinstance(machine, str) else machine
        return resolve(
            run_config(**({"data": DATA} | (request or {}))),
            model_facts(tmp_path, config),
            tokenizers[tokenizer],
            machine,
            measurements=measurements,
            environment=environment or {},
        )

    return decide


def decisions(plan):
    """What a reader would look at first, in one line."""
    precision, attention, tokens = plan.precision, plan.attention, plan.tokenizer
    return " ".join(
        [
            plan.device.value,
            f"{precision.compute.value}/{precision.base.value}",
            "scaler" if precision.scaler.value else "unscaled",
            "tf32" if precision.tf32.value else "ieee",
            f"{attention.implementation.value}:{attention.expected.value}",
            tokens.pad_token.value,
            tokens.template.value,
            plan.adapter.kind.value if plan.adapter else "full",
            "checkpointing" if plan.memory.gradient_checkpointing.value else "plain",
            f"{plan.batch.micro.value}x{plan.batch.accumulation}",
        ]
    )


MODELS = {
    "8B": LLAMA31_8B,
    "7B": LLAMA2_7B,
    "1B": LLAMA32_1B,
    "small": SMALL,
    "narrow": NARROW,
    "dropping": DROPPING,
}
MACHINES = {  # with what was measured there
    "T4": (T4, None),
    "amx": (AMX, FAST_BF16),
    "emulating": (AMX, SLOW_BF16),
    "eager-wins": (AMX, EAGER_WINS),
}
ONE = {"batch": {"size": 1}}
REQUESTS = {
    "lora": {},
    "lora-one": ONE,
    "dora": {"adapter": {"kind": "dora"}},
    "full": {"adapter": None},
    "full-one": {"adapter": None} | ONE,
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16-one": {"precision": "fp16"} | ONE,
    "sdpa": {"attention": "sdpa"},
    "eager": {"attention": "eager"} | ONE,
    "fa2-fp32": {"attention": "flash_attention_2", "precision": "fp32"},
    "add-pad": {"tokenizer": {"pad": "add"}},
    "pad-0": {"tokenizer": {"pad": "!"}},
    "llama3": {"data": DATA | {"template": "llama3"}},
    "long": {"data": DATA | {"max_length": 8192}},
}
GOLDEN = """
8B       3.1  h100       lora     cuda bf16/bf16 unscaled tf32 sdpa:flash <|finetune_right_pad_id|> alpaca lora plain 16x1
8B       3.0  h100       lora     cuda bf16/bf16 unscaled tf32 sdpa:flash <|reserved_special_token_0|> alpaca lora plain 16x1
8B       chat h200       full-one cuda bf16/fp32 unscaled tf32 sdpa:flash <|finetune_right_pad_id|> tokenizer full plain 1x1
8B       chat a100       fp16     cuda fp16/fp16 scaler tf32 sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 16x1
8B       chat h100       fp32     cuda fp32/fp32 unscaled ieee sdpa:mem_efficient <|finetune_right_pad_id|> tokenizer lora plain 6x3
8B       chat rtx4090    lora-one cuda bf16/bf16 unscaled tf32 sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 1x1
8B       chat rtx4090    full     REFUSED model
7B       2    a100       lora     cuda bf16/bf16 unscaled tf32 sdpa:flash <unk> alpaca lora plain 16x1
7B       2    T4         fp16-one cuda fp16/fp16 scaler ieee sdpa:mem_efficient <unk> alpaca lora checkpointing 1x1
7B       2    v100-32    fp16-one cuda fp16/fp16 scaler ieee sdpa:mem_efficient <unk> alpaca lora plain 1x1
7B       2    a100       long     REFUSED data.max_length
1B       chat rtx4090    lora     cuda bf16/bf16 unscaled tf32 sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 16x1
1B       chat rtx4090    eager    cuda bf16/bf16 unscaled tf32 eager:eager <|finetune_right_pad_id|> tokenizer lora plain 1x1
1B       chat T4         full-one REFUSED model
small    chat cpu        lora     cpu fp32/fp32 unscaled ieee sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 16x1
small    chat amx        lora     cpu bf16/bf16 unscaled ieee sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 16x1
small    chat amx        full     cpu bf16/fp32 unscaled ieee sdpa:flash <|finetune_right_pad_id|> tokenizer full plain 16x1
small    chat emulating  lora     cpu fp32/fp32 unscaled ieee sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 16x1
small    chat emulating  bf16     cpu bf16/bf16 unscaled ieee sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 16x1
small    chat eager-wins lora     cpu fp32/fp32 unscaled ieee eager:eager <|finetune_right_pad_id|> tokenizer lora plain 16x1
small    chat eager-wins sdpa     cpu fp32/fp32 unscaled ieee sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 16x1
dropping chat cpu        lora     cpu fp32/fp32 unscaled ieee sdpa:math <|finetune_right_pad_id|> tokenizer lora plain 16x1
narrow   chat amx        lora     cpu fp32/fp32 unscaled ieee sdpa:flash <|finetune_right_pad_id|> tokenizer lora plain 16x1
small    chat h100       dora     cuda bf16/bf16 unscaled tf32 sdpa:flash <|finetune_right_pad_id|> tokenizer dora plain 16x1
small    chat h100       add-pad  cuda bf16/bf16 unscaled tf32 sdpa:flash <|pad|> tokenizer lora plain 16x1
small    chat h100       pad-0    REFUSED tokenizer.pad
small    2    h100       llama3   REFUSED data.template
small    chat T4         bf16     REFUSED precision.compute
small    chat h100       fa2-fp32 REFUSED attention.implementation
"""  # noqa: E501
ROWS = [line.split(maxsplit=4) for line in GOLDEN.strip().splitlines()]


def test_golden(decide):
    for model, tokenizer, machine, request_, expected in ROWS:
        hardware, measurements = MACHINES.get(machine, (machine, None))
        try:
            found = decisions(decide(MODELS[model], tokenizer, hardware, REQUESTS[request_], measurements))
        except InputError as error:
            found = "REFUSED " + ", ".join(fault.where for fault in error.faults)
        assert found == expected


@pytest.mark.parametrize(("packing", "more"), [("on", True), ("off", False)])
def test_the_forecast_knows_the_form_of_packed_rows(decide, packing, more):
    """sdpa joins the outputs of short documents; in padded rows, the twin, nothing depends on it."""
    request = {"data": DATA | {"packing": packing, "max_length": 256}}
    found = []
    for form in ("matmul", "sdpa"):
        trials = tuple(AttentionTrial(one, 1.0 if one == form else 2.0, "") for one in ("matmul", "sdpa", "padded"))
        found.append(decide(SMALL, "chat", "cpu", request, dataclasses.replace(EAGER_WINS, documents=trials)))
    matmul, sdpa = found
    assert (matmul.kernels.documents.value, sdpa.kernels.documents.value) == (
        ("matmul", "sdpa") if more else ("plain", "plain")
    )
    assert matmul.batch.micro.value == sdpa.batch.micro.value
    assert (sdpa.memory.activations > 1.02 * matmul.memory.activations) == more
    assert more or matmul.memory == sdpa.memory


def test_all_conflicts_come_at_once(decide):
    request = {
        "tokenizer": {"pad": "<nope>"},
        "adapter": {"kind": "lora", "targets": ["query"]},
        "attention": {"math": "off", "flash": "off"},
        "precision": {"tf32": "on"},
        "data": {"train": "unused.jsonl", "max_length": 200_000, "template": "klingon"},
        "batch": {"size": 2, "micro": 4},
    }
    with pytest.raises(InputError) as caught:
        decide(SMALL, "chat", "cpu", request)
    assert {fault.where for fault in caught.value.faults} == {
        "tokenizer.pad",
        "adapter.targets",
        "attention",
        "precision.tf32",
        "data.max_length",
        "data.template",
        "batch.micro",
    }
    assert all(fault.fix for fault in caught.value.faults)


KERNELS_OFF = dict.fromkeys(("flash", "mem_efficient", "cudnn", "math"), "off")
CONTRADICTIONS = [  # the key that is named, the request
    ("batch.micro", {"batch": {"size": 2, "micro": 4}}),
    ("attention.flash", {"attention": {"implementation": "eager", "flash": "on"}}),
    ("attention.implementation", {"attention": KERNELS_OFF}),
    ("precision.base", {"adapter": None, "precision": {"base": "bf16"}}),
    ("precision.base", {"adapter": None, "precision": {"base": "fp16"}}),
    ("samples.count", {"samples": {"count": 2}}),
]


def check_what_the_config_alone_contradicts_is_refused_once(decide, key, request_):
    with pytest.raises(InputError) as caught:
        decide(SMALL, "chat", "h100", request_)
    assert [fault.where for fault in caught.value.faults] == [key]
    assert caught.value.faults[0].fix


def test_what_the_config_alone_contradicts_is_refused_once(decide):
    for key, request_ in CONTRADICTIONS:
        check_what_the_config_alone_contradicts_is_refused_once(decide, key, request_)


def test_twin_no_policy_repeats_these_rules(decide, monkeypatch):
    monkeypatch.setattr(module, "contradictions", lambda config: [])
    for key, request_ in CONTRADICTIONS:
        with pytest.raises(pytest.fail.Exception):
            check_what_the_config_alone_contradicts_is_refused_once(decide, key, request_)


def test_the_plan_is_a_function_of_its_arguments(decide, tmp_path, monkeypatch):
    plan = decide(SMALL, "chat", "h100")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unused").write_text("the config calls its run folder so: to plan is not to look")
    assert decide(SMALL, "chat", "h100") == plan


def test_every_choice_has_a_reason(decide):
    def choices(value):
        if dataclasses.is_dataclass(value):
            if hasattr(value, "reason"):
                yield value
            for field in dataclasses.fields(value):
                yield from choices(getattr(value, field.name))

    for machine in ("cpu", "h100"):
        found = list(choices(decide(SMALL, "chat", machine)))
        assert len(found) >= 18
        assert all(choice.reason for choice in found)


def test_added_rows_are_counted(decide):
    rows = SMALL | {"vocab_size": 128_256}
    added = decide(rows, "chat", "h100", {"tokenizer": {"pad": "add"}, "adapter": None})
    plain = decide(rows, "chat", "h100", {"adapter": None})
    assert added.tokenizer.added_rows == 1
    assert added.parameters - plain.parameters == 512  # tied: one matrix
    assert added.trainable == added.parameters
    head = {"adapter": {"kind": "lora", "modules_to_save": ["lm_head"]}}
    kept = decide(rows, "chat", "h100", head).trainable
    assert decide(rows, "chat", "h100", {"tokenizer": {"pad": "add"}} | head).trainable - kept == 512
    untied = rows | {"tie_word_embeddings": False}
    more = decide(untied, "chat", "h100", {"tokenizer": {"pad": "add"}, "adapter": None})
    assert more.parameters - decide(untied, "chat", "h100", {"adapter": None}).parameters == 2 * 512


def test_auto_max_length_reaches_memory_and_batch(decide):
    few = SMALL | {"max_position_embeddings": 512}
    auto = decide(few, "chat", "h100", {"data": {"train": "unused.jsonl"}})
    asked = decide(few, "chat", "h100", {"data": DATA})  # 512 too
    assert (auto.tokenizer.max_length.value, auto.memory, auto.batch) == (512, asked.memory, asked.batch)
    longer = decide(SMALL, "chat", "h100", {"data": {"train": "unused.jsonl"}})
    assert longer.tokenizer.max_length.value == 2048
    assert longer.memory.activations // longer.batch.micro.value > asked.memory.activations // asked.batch.micro.value


def test_memory_that_others_use_is_a_caution_and_changes_nothing(decide):
    idle = dataclasses.replace(preset("cpu"), free=2**34)
    busy = dataclasses.replace(preset("cpu"), free=2**28)
    one, two = decide(SMALL, "chat", idle), decide(SMALL, "chat", busy)
    assert len(two.cautions) == len(one.cautions) + 1
    assert dataclasses.replace(two, cautions=one.cautions) == one


def test_compile_is_opt_in(decide):
    assert decide(SMALL, "chat", "h100").compile.value == "off"
    plan = decide(SMALL, "chat", "h100", {"compile": "max-autotune"})
    assert (plan.compile.value, plan.compile.source) == ("max-autotune", "user")
    assert "minutes" in "\n".join(plan.cautions)
    usual = decide(SMALL, "chat", "h100", {"compile": "default"}).cautions
    assert len(plan.cautions) == len(usual) + 1  # kernels chosen by timing


def test_an_unknown_family_is_planned_with_a_caution(decide, monkeypatch):
    known = model_facts
    monkeypatch.setattr(
        sys.modules[__name__],
        "model_facts",
        lambda folder, config: dataclasses.replace(known(folder, config), family=None, model_type="novel"),
    )
    plan = decide(SMALL, "chat", "h100")
    assert "'novel'" in plan.cautions[0]
    assert plan.adapter.targets.value[0] == "model.layers.0.self_attn.q_proj"


def test_environment_reaches_the_plan(decide):
    plan = decide(SMALL, "chat", "h100", environment={"SDPA_BACKEND": "math", "NVIDIA_TF32_OVERRIDE": "0"})
    assert [(finding.name, finding.verdict) for finding in plan.environment] == [
        ("NVIDIA_TF32_OVERRIDE", "used"),
        ("SDPA_BACKEND", "ignored"),
    ]
    assert plan.precision.tf32.value is False


def test_planning_imports_no_torch():
    program = "import sys, surefoot.planning.resolve, surefoot.planning.plan; print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "'torch'" not in out
    assert "'transformers'" not in out


def test_pictures_whose_tokens_see_each_other_take_a_mask(tmp_path, tokenizers):
    """On a GPU, where flash takes none."""

    def decided(both_ways, pictures, **request):
        facts = dataclasses.replace(model_facts(tmp_path, SMALL), both_ways=both_ways)
        config = run_config(data=DATA, **request)
        lengths = LengthFacts(longest=256, typical=128, pictures=pictures)
        how = {"measurements": None, "environment": {}, "lengths": lengths}
        return resolve(config, facts, tokenizers["3.1"], preset("h100"), **how)

    expected = {
        (True, True): "mem_efficient",
        (True, False): "flash",
        (False, True): "flash",
    }  # twins
    for both_ways, pictures in expected:
        found = decided(both_ways, pictures).attention.expected.value
        assert found == expected[both_ways, pictures]
    decided(True, False, attention={"implementation": "flash_attention_2"})
    with pytest.raises(InputError) as error:
        decided(True, True, attention={"implementation": "flash_attention_2"})
    assert [fault.where for fault in error.value.faults] == ["attention.implementation"]
