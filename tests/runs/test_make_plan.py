"""From a config to a plan: what is read, what is measured, and what is not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import surefoot.planning.probes.attention
import surefoot.planning.probes.child
import surefoot.planning.probes.matmul
from helpers.faults import gives, raises_fault
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from helpers.tiny_models import tiny_llama
from surefoot.planning.deterministic import with_deterministic
from surefoot.planning.measurements import AttentionTrial, LengthFacts
from surefoot.planning.probes.sizes import AttentionRequest
from surefoot.runs.make_plan import make_plan
from surefoot.system import hardware as machine
from surefoot.system.hardware import Hardware, preset

WIDE = LLAMA31_8B | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE |= {"num_key_value_heads": 2}
SHORT = {"train": "unused.jsonl", "max_length": 64}
HERE = Hardware("this CPU", "cpu", 2**35, None, False, False, False, 2, preset=False)


@pytest.fixture
def folder(tmp_path):
    llama3_tokenizer(tmp_path)
    model_facts(tmp_path, WIDE)
    return str(tmp_path)


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """Probes that write down what they are asked for, and find bf16 fast and flash best. Nothing is kept so far."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = []

    def products(shapes, device, *, dtypes):
        asked.append(("products", tuple(dtypes), max(shapes)))
        return dict.fromkeys(dtypes, 1e12) | {"fp32": 2e11}

    def attention(asked_for, **how):
        asked.append(
            ("attention", asked_for.forms, asked_for.dtype, asked_for.length, asked_for.heads, asked_for.kv_heads)
        )
        return tuple(AttentionTrial(form, 0.01 * (1 + place), "") for place, form in enumerate(asked_for.forms))

    monkeypatch.setattr(surefoot.planning.probes.matmul, "product_rates", products)
    monkeypatch.setattr(surefoot.planning.probes.attention, "attention_trials", attention)
    monkeypatch.setattr(machine, "detect", lambda: HERE)
    return asked


def test_attention_is_measured_in_the_type_that_the_products_chose(folder, probes):
    plan = make_plan(run_config(model=folder))
    assert probes == [
        ("products", ("fp32", "bf16"), (256, 512)),
        ("attention", ("flash", "math", "eager"), "bf16", 2048, 4, 2),
    ]
    assert (plan.precision.compute.value, plan.precision.compute.source) == ("bf16", "measured")
    assert plan.attention.expected.value == "flash"
    assert plan.measurements["attention_dtype"] == "bf16"


@pytest.mark.parametrize(
    ("request_", "asked"),
    [
        ({"precision": "fp32"}, ["attention"]),
        ({"precision": "fp16"}, ["products", "attention"]),
        ({"attention": "eager"}, ["products"]),
        ({"attention": "eager", "precision": "fp32"}, []),
        ({"attention": {"flash": "off"}}, ["products"]),
        ({"attention": "sdpa"}, ["products", "attention"]),
    ],
)
def test_what_the_request_decides_is_not_measured(folder, probes, request_, asked):
    make_plan(run_config(model=folder, **request_))
    assert [kind for kind, *_ in probes] == asked


def test_sdpa_on_request_is_not_compared_with_eager(folder, probes):
    make_plan(run_config(model=folder, attention="sdpa"))
    assert probes[-1][1] == ("flash", "math")


def test_attention_is_measured_at_no_more_tokens_than_the_model_takes(tmp_path, folder, probes):
    model_facts(tmp_path, WIDE | {"max_position_embeddings": 300})
    plan = make_plan(run_config(model=folder))
    assert probes[-1][3] == plan.tokenizer.max_length.value == 300


def test_known_lengths_are_what_attention_is_measured_at(folder, probes):
    make_plan(run_config(model=folder), lengths=LengthFacts(longest=900, typical=300))
    assert probes[-1][3] == 300


def test_old_measurements_stand_in_for_new_ones(folder, probes):
    first = make_plan(run_config(model=folder))
    probes.clear()
    again = make_plan(run_config(model=folder), measurements=first.measurements)
    assert probes == []
    assert again == first


def test_what_this_machine_was_asked_before_is_not_measured_again(folder, probes):
    first = make_plan(run_config(model=folder))
    probes.clear()
    assert make_plan(run_config(model=folder)) == first
    assert probes == []
    make_plan(run_config(model=folder), lengths=LengthFacts(longest=900, typical=300))
    assert [kind for kind, *_ in probes] == ["attention"]  # another length is another question


def test_threads_are_measured_where_nobody_has_said_how_many(folder, probes, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("MKL_NUM_THREADS")
    monkeypatch.setattr(machine, "detect", lambda: replace(HERE, cores=8))
    monkeypatch.setattr(
        surefoot.planning.probes.matmul, "thread_rates", lambda shape, counts: {1: 1.0, 2: 2.0, 4: 4.0, 8: 1.5}
    )
    plan = make_plan(run_config(model=folder))
    assert (plan.threads.value, plan.threads.source) == (4, "measured")
    assert make_plan(run_config(model=folder), measurements=plan.measurements).threads == plan.threads


@pytest.mark.parametrize(("longest", "window"), [(256, 100), (99, None)])
def test_attention_is_measured_with_the_window_that_examples_reach_beyond(
    tmp_path, monkeypatch, probes, longest, window
):
    asked = []
    monkeypatch.setattr(
        surefoot.planning.probes.child, "run_request", lambda request, probe: asked.append(request) or ()
    )
    model_facts(tmp_path, WIDE | {"model_type": "mistral", "sliding_window": 100})
    make_plan(run_config(model=str(llama3_tokenizer(tmp_path))), lengths=LengthFacts(longest=longest, typical=50))
    assert [request.window for request in asked if isinstance(request, AttentionRequest)] == [window]


def test_packing_is_refused_where_a_window_counts_as_used(tmp_path, probes):
    """Starcoder2 has no row and no `layer_types`; its mask in transformers follows `sliding_window` alone."""
    base, packed = str(llama3_tokenizer(tmp_path)), {"data": SHORT | {"packing": "on"}, "stage": "pretrain"}

    def written(**keys):
        (tmp_path / "config.json").write_text(json.dumps(WIDE | {"model_type": "starcoder2"} | keys))
        return run_config(model=base, **packed)

    with raises_fault("SF-CONFIG-CONFLICT", "data.packing", "16", "64"):
        make_plan(written(sliding_window=16))
    for keys in ({"sliding_window": None}, {"sliding_window": 16, "use_sliding_window": False}):  # twins
        assert make_plan(written(**keys)).kernels.documents.value == "sdpa"


def test_on_a_gpu_the_runs_own_rows_and_documents_are_asked_for_and_tf32_is_measured(tmp_path, monkeypatch, probes):
    """By a machine that is said to have one; the twin, on a CPU, asks for one row and a thousand tokens."""
    asked: list = []
    for way in ("run_in_child", "run_request"):
        monkeypatch.setattr(surefoot.planning.probes.child, way, lambda request, probe: asked.append(request) or ())
    monkeypatch.setattr(surefoot.planning.probes.matmul, "tf32_rate", lambda shapes, device: 1e12)
    monkeypatch.setattr(machine, "forget_peak", lambda kind: asked.append(kind))
    lengths = LengthFacts(longest=2000, typical=1500, mean=900.0, mix=(300, 900, 1500))
    base = str(llama3_tokenizer(tmp_path))
    model_facts(tmp_path, WIDE)
    config = run_config(model=base, batch={"size": 64, "micro": 3})
    gpu = replace(preset("h100"), preset=False, free=2**36, flash_attention_2=False, liger=False)
    monkeypatch.setattr(machine, "detect", lambda: gpu)
    plan = make_plan(config, lengths=lengths)
    attention, documents, last = asked
    assert (attention.device, attention.length, attention.rows) == ("cuda", 1500, 3)
    assert documents.forms == (*with_deterministic(["varlen"]), "padded")
    assert (documents.tokens, documents.mix) == (4500, lengths.mix)
    assert last == "cuda"
    assert plan.measurements["tf32"] == 1e12
    assert (plan.precision.tf32.value, plan.precision.tf32.source) == (True, "measured")
    asked.clear()
    monkeypatch.setattr(machine, "detect", lambda: HERE)
    assert make_plan(config, lengths=lengths).measurements["tf32"] is None
    attention, pointwise, documents, _ = asked
    assert (attention.rows, documents.tokens) == (1, 1024)
    assert pointwise.parts == ("norm", "rotary")


def test_nothing_is_measured_for_a_preset_or_on_request(folder, probes):
    assert make_plan(run_config(model=folder), hardware=preset("h100")).measurements == {}
    assert make_plan(run_config(model=folder), measure=False).measurements == {}
    assert probes == []


def test_a_narrow_model_on_a_cpu_is_planned_without_measuring(tmp_path, probes):
    base = tiny_llama(tmp_path)
    plan = make_plan(run_config(model=str(base), data=SHORT))
    assert probes == []
    assert plan.precision.compute.value == "fp32"


@pytest.mark.parametrize(("asked", "times"), [("bf16", "20.0"), ("auto", None)])
def test_what_a_type_costs_a_narrow_model_is_measured_where_it_was_asked_for(tmp_path, monkeypatch, asked, times):
    """The twin leaves it open, and nothing is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "detect", lambda: HERE)
    rates = {"fp32": 2e12, "bf16": 1e11}
    monkeypatch.setattr(surefoot.planning.probes.matmul, "product_rates", lambda shapes, device, *, dtypes: rates)
    base = tiny_llama(tmp_path / "base")
    plan = make_plan(run_config(model=str(base), data=SHORT, precision=asked))
    assert ("products" in plan.measurements) == (times is not None)
    assert [gives(one, times) for one in plan.cautions if gives(one, "bf16")] == [True] * (times is not None)


def test_this_machine_really_is_measured(tmp_path):
    base = tiny_llama(tmp_path, hidden=256, heads=4, kv_heads=2)
    plan = make_plan(run_config(model=str(base), data=SHORT))
    assert set(plan.measurements["products"]) == {"fp32", "bf16"}
    assert {trial["form"] for trial in plan.measurements["attention"]} >= {"flash", "math", "eager"}
    assert plan.precision.compute.source == "measured"


def test_a_plan_needs_no_weights(tmp_path, probes):
    base = tiny_llama(tmp_path)
    (base / "model.safetensors").unlink()
    assert make_plan(run_config(model=str(base), data=SHORT)).parameters > 0


def test_an_unknown_family_is_read_off_its_module_tree(tmp_path, probes):
    config = {key: value for key, value in WIDE.items() if key != "torch_dtype"}
    config |= {"model_type": "helium", "head_dim": WIDE["hidden_size"] // WIDE["num_attention_heads"]}
    llama3_tokenizer(tmp_path / "novel")
    (tmp_path / "novel" / "config.json").write_text(json.dumps(config))
    llama3_tokenizer(tmp_path / "known")
    model_facts(tmp_path / "known", WIDE)
    novel, known = (make_plan(run_config(model=str(tmp_path / name), data=SHORT)) for name in ("novel", "known"))
    assert "'helium'" in novel.cautions[0]
    assert novel.parameters == known.parameters
    assert set(novel.adapter.targets.value) == set(known.adapter.targets.value)


def test_a_config_that_would_fetch_code_is_refused_before_anything_is_planned(folder):
    model_facts(Path(folder), WIDE | {"_attn_implementation": "someone/kernels"})
    with raises_fault("SF-MODEL-KIND", f"{folder}/config.json"):
        make_plan(run_config(model=folder), hardware=preset("cpu"))
