"""The whole examination: a clean run has no finding; what the old notes suffered from is planted and named.
No code is passed over in silence: what left no line is in order, or does not apply, and says why.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

import surefoot.commands.doctor.examine as module
from helpers.doctor_runs import ROWS, clean_base, clean_run
from helpers.faults import gives
from helpers.model_layouts import run_config
from surefoot.commands.doctor import machine
from surefoot.commands.doctor.examine import examine, rest
from surefoot.commands.doctor.findings import CODES, NEAR, caution, ok, to_json
from surefoot.commands.doctor.machine import environment_lines
from surefoot.models import forward
from surefoot.planning.environment import environment_without_plan
from surefoot.planning.measurements import Measurements
from surefoot.planning.plan import Choice
from surefoot.planning.precision import NARROW
from surefoot.planning.probes import child
from surefoot.runs.trial import ready
from surefoot.system import hardware
from surefoot.system.messages import size_text


@pytest.fixture
def no_passes(monkeypatch):
    """The examination without the model's passes, where other lines are looked at."""
    monkeypatch.setattr(module, "_taken", lambda one, seen: iter(()))
    monkeypatch.setattr(module, "own_pass", lambda one: None)
    monkeypatch.setattr(module, "parity_lines", lambda *given: iter(()))


def codes(found):
    return {one.code for one in found.findings}


def test_a_clean_run_yields_no_finding_and_leaves_nothing(tmp_path, base):
    config = clean_run(tmp_path, base)
    threads = torch.get_num_threads()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    told = []
    found = examine(config, on_finding=told.append)
    assert [(one.code, one.value) for one in found.findings] == []
    assert told == [*found.looked_at][: len(told)]
    assert len(told) > len(CODES) / 2
    assert found.exit_code == 0
    assert {one.code for one in found.looked_at} == set(CODES)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert torch.get_num_threads() == threads
    json.dumps(to_json(found), allow_nan=False)


def lines_of(found, code):
    return [one for one in found.looked_at if one.code == code]


def test_a_packed_run_of_several_micro_batches_yields_no_finding(tmp_path, base):
    """Of 6, 5 and 5 examples. Its model and data are here, so the hub is left alone."""
    data = {"train": str(tmp_path / "train.json"), "max_length": 128, "packing": "on"}
    found = examine(clean_run(tmp_path, base, data=data, batch={"size": 16, "micro": 6}))
    assert (found.findings, found.exit_code) == ((), 0)
    assert [one.verdict for one in lines_of(found, "FAST-PATH")] == ["ok"]
    (leak,) = lines_of(found, "PACK-LEAK")
    assert gives(leak.value, 6)
    (hub,) = lines_of(found, "HUB")
    assert (hub.verdict, hub.where) == ("ok", "")


def test_a_leak_between_packed_documents_is_named(tmp_path, base, monkeypatch):
    """Planted behind the comparisons that come before step 1, which would have taken the packed rows out."""
    real_forward, real_line = forward.documents_of, module.leak_line

    def leaking(one):
        with monkeypatch.context() as patched:
            patched.setattr(forward, "documents_of", lambda lengths, device: real_forward((sum(lengths),), device))
            return real_line(one)

    monkeypatch.setattr(module, "leak_line", leaking)
    data = {"train": str(tmp_path / "train.json"), "max_length": 128, "packing": "on"}
    found = examine(clean_run(tmp_path, base, data=data, batch={"size": 16, "micro": 6}))
    assert (codes(found), found.exit_code) == ({"PACK-LEAK"}, 3)


def test_the_form_of_packed_rows_of_a_model_that_is_measured(tmp_path):
    wide = clean_base(tmp_path / "base", hidden=NARROW)
    data = {"train": str(tmp_path / "train.json"), "max_length": 128, "packing": "on"}
    found = examine(clean_run(tmp_path, wide, data=data, batch={"size": 16}))
    assert {one.code for one in found.findings if one.verdict == "fault"} == set()
    forms = {trial["form"] for trial in found.facts["measurements"]["documents"]}
    (packed,) = [one for one in lines_of(found, "ATTN-KERNEL") if one.where.split()[-1] in forms]
    assert packed.verdict == "ok"


def test_a_run_that_reads_from_the_hub_asks_it(tmp_path, base, monkeypatch, no_passes):
    """The model is found before the hub is asked, as in a cache; the twin above asks nobody."""
    asked = []
    monkeypatch.setattr(module, "hub_names", lambda config: ["org/base"])
    monkeypatch.setattr(machine, "hub_obstacle", lambda: asked.append(1) or "it cannot be reached")
    found = examine(clean_run(tmp_path, base))
    (hub,) = lines_of(found, "HUB")
    assert (hub.verdict, hub.where, found.exit_code, len(asked)) == ("caution", "org/base", 0, 1)


def long_rows(folder):
    rows = [{**row, "instruction": "heron " * 60 + row["instruction"]} for row in ROWS]
    (folder / "train.json").write_text(json.dumps(rows))


def test_the_math_kernel_where_flash_is_right_and_faster_and_useless_workers(tmp_path, base, monkeypatch):
    """About 400 tokens to a row: every score is stored, in both directions. On a busy machine the probe may be out by
    more than flash is faster: what it found stays, but for the time. Workers, which batches like these do not need,
    are named beside it."""
    long_rows(tmp_path)
    real = module.measured_attention

    def timed(request, kept):
        return tuple(replace(one, seconds=0.001 if one.form == "flash" else 0.002) for one in real(request, kept))

    monkeypatch.setattr(module, "measured_attention", timed)
    data = {"train": str(tmp_path / "train.json"), "max_length": 512}
    with_workers = {**data, "workers": 2}
    forced = {"implementation": "sdpa", "flash": "off", "mem_efficient": "off", "cudnn": "off", "math": "on"}
    found = examine(clean_run(tmp_path, base, data=with_workers, attention=forced, kernels={"adapter": "plain"}))
    assert "WORKERS-USELESS" in codes(found)
    line = next(one for one in found.looked_at if one.code == "ATTN-MATH")
    assert line.verdict == "caution", line.value
    assert line.gain is not None
    assert ("faster" in line.value) is (line.gain >= NEAR)
    free = examine(clean_run(tmp_path, base, data=data))
    assert not {"ATTN-MATH", "WORKERS-USELESS"} & codes(free)


def test_attention_is_asked_for_as_the_plan_asked(tmp_path, base, monkeypatch):
    """Which knew of no measurement yet: what it measured made the type another one, and with it the micro-batch."""
    asked = []
    monkeypatch.setattr(module, "_measure", lambda *given: asked.append(given[-1]) or Measurements())
    with ready(clean_run(tmp_path, base), 1) as one:
        draft = one.plan.batch.micro
        batch = replace(one.plan.batch, micro=replace(draft, value=draft.value + 3))
        measured = replace(one, run=replace(one.run, plan=replace(one.plan, batch=batch)))
        module._measured_for(measured, replace(hardware.detect(), kind="cuda"), None)
    assert [request.rows for request in asked] == [draft.value]


@pytest.mark.parametrize(
    ("max_length", "raised"),
    [(64, True), (512, False)],  # the second is all that the model has
)
def test_answers_that_are_cut_get_a_fix_that_can_be_followed(tmp_path, base, max_length, raised):
    rows = [{**row, "output": "heron " * 600} for row in ROWS[:4]]
    (tmp_path / "train.json").write_text(json.dumps(rows + ROWS[4:]))
    config = clean_run(tmp_path, base, data={"train": str(tmp_path / "train.json"), "max_length": max_length})
    with ready(config, 1) as one:
        (line,) = [line for line in module._planned(one, hardware.detect()) if line.code == "TOK-STOP"]
    assert (line.verdict, gives(line.fix, "data.max_length")) == ("caution", raised)
    assert line.fix


def at_once(micro):
    return {"batch": {"size": 16, "micro": micro}, "gradient_checkpointing": "off"}


def forecast(config):
    with ready(config, 1) as one:
        return one.plan.memory.total


def test_an_oversubscribed_micro_batch(tmp_path, base, monkeypatch, no_passes):
    """A machine whose usable memory lies between the forecasts for 16 and for 8 examples at once."""
    here = hardware.detect()
    limit = sum(forecast(clean_run(tmp_path, base, **at_once(micro))) for micro in (8, 16)) // 2
    small = int((2**30 + limit) / 0.9)
    monkeypatch.setattr(hardware, "detect", lambda: replace(here, memory=small, free=small))
    config = clean_run(tmp_path, base, **at_once(16))
    line = next(one for one in examine(config).looked_at if one.code == "MEM-OVERSUBSCRIBED")
    assert line.verdict == "caution"
    assert all(gives(line.fix, value) for value in ("batch.micro", 8))  # the half has room
    assert line.gain is not None
    assert size_text(limit) in line.value


def test_what_has_no_room_in_the_memory_that_is_free_is_not_tried(tmp_path, base, monkeypatch):
    here = hardware.detect()
    config = clean_run(tmp_path, base, **at_once(16))
    free = forecast(config) - 1
    monkeypatch.setattr(hardware, "detect", lambda: replace(here, free=free))
    monkeypatch.setattr(module, "_taken", None)
    monkeypatch.setattr(module, "gain_of_micro", None)
    looked_at = examine(config).looked_at
    line = next(one for one in looked_at if one.code == "MEM-OVERSUBSCRIBED")
    assert (line.verdict, line.gain) == ("caution", None)
    passes = [one for one in looked_at if one.code in ("LOSS-FINITE", "BWD-RATIO", "FAST-PATH", "PACK-LEAK")]
    assert {one.verdict for one in passes} == {"unknown"}
    assert all(size_text(free) in one.value for one in passes)
    assert len(passes) == 4


def test_the_gain_of_a_variable_is_that_of_the_type_which_the_plan_would_take_without_it():
    """With it fp32 is the fastest, and computes; without it bf16 is four times as fast."""
    lines = environment_lines(environment_without_plan({"DNNL_MAX_CPU_ISA": "AVX2"}, "cpu", 2))
    seen = Measurements(products={"fp32": 1e11, "bf16": 1e10})

    def gains(compute, there):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("surefoot.planning.probes.matmul.rates_without", lambda names, shape, dtypes, kind: there)
            return [one.gain for one in module._with_cost(lines, seen, [(8, 8)], hardware.detect(), compute)]

    there = {"fp32": 1e11, "bf16": 4e11}
    assert gains(Choice("fp32", "", "measured"), there) == [4.0]
    assert gains(Choice("fp32", "", "user"), there) == [1.0]  # asked for, whatever is faster
    assert gains(Choice("bf16", "", "user"), there) == [40.0]
    assert gains(None, there) == [40.0]


def test_variables_of_the_environment(tmp_path, base, monkeypatch, no_passes):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("PYTORCH_SDP_KERNEL", "math")
    monkeypatch.setattr(
        "surefoot.planning.probes.matmul.rates_without", lambda names, shape, dtypes, kind: {"fp32": 1e15}
    )
    lines = [one for one in examine(clean_run(tmp_path, base)).findings if one.code.startswith("ENV")]
    assert [(one.code, one.where) for one in lines] == [
        ("ENV-OVERRIDE", "ATEN_CPU_CAPABILITY"),
        ("ENV-UNREAD", "PYTORCH_SDP_KERNEL"),
    ]
    assert lines[0].gain is not None
    assert lines[0].gain > 1


def test_more_threads_than_cores(tmp_path, base, monkeypatch, no_passes):
    """The plan takes what the environment said before torch started; here torch is told."""
    here = hardware.detect()
    monkeypatch.setattr(hardware, "detect", lambda: replace(here, cores=4 * hardware.usable_cores()))
    monkeypatch.setattr(module, "measured_threads", lambda shapes, cores, kept: {1: 2e11, 4 * cores: 1e11, cores: 1e11})
    lines = [one for one in examine(clean_run(tmp_path, base)).findings if one.code == "THREADS"]
    assert [one.gain for one in lines] == [2.0]


def first_and_only(found, code, exit_code):
    (line,) = found.findings
    assert (line.code, line.verdict, found.exit_code) == (code, "fault", exit_code)
    assert line.limit == CODES[code].limit
    return line


def test_what_the_plan_refuses(tmp_path, base):
    for code, changes in (
        ("ADAPTER-TARGETS", {"adapter": {"kind": "lora", "rank": 4, "targets": ["q_prj"]}}),
        ("DTYPE-CONFLICT", {"precision": {"compute": "bf16", "base": "fp16"}}),
        ("TOK-PAD", {"tokenizer": {"pad": "<|nothing|>"}}),
    ):
        first_and_only(examine(clean_run(tmp_path, base, **changes)), code, 2)


def test_no_label_is_left(tmp_path, base):
    rows = [{"instruction": "heron " * 30, "input": "", "output": ""} for _ in range(4)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    found = examine(clean_run(tmp_path, base))
    assert found.exit_code == 2
    assert codes(found) <= {"LABEL-NONE", "DATA"}


def test_records_that_cannot_be_read(tmp_path, base):
    (tmp_path / "train.json").write_text("{")
    first_and_only(examine(clean_run(tmp_path, base)), "DATA", 2)


def test_rows_of_norm_zero_and_a_twin_under_lora(tmp_path, no_passes):
    base = clean_base(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3] = 0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    line = first_and_only(examine(clean_run(tmp_path, base, adapter={"kind": "dora", "rank": 4})), "ROW-ZERO-NORM", 2)
    assert line.where == "model.layers.0.mlp.up_proj"
    assert examine(clean_run(tmp_path, base)).findings == ()


def test_weights_that_are_not_finite(tmp_path):
    base = clean_base(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    first_and_only(examine(clean_run(tmp_path, base)), "MODEL", 2)


def test_the_machine_alone_is_measured_once_and_anew_where_that_is_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "hub_line", lambda: module.ok("HUB", "it answers"))
    asked = []
    monkeypatch.setattr(child, "run_request", cache(child.run_request))  # which takes a second, and copies tell enough
    monkeypatch.setattr("surefoot.planning.probes.timing.copy_rate", lambda device: asked.append(device) or 1e10)
    examine(None)
    found = examine(None)
    assert {one.code for one in found.looked_at} == {name for name, code in CODES.items() if code.group == "machine"}
    assert (found.exit_code, len(asked)) == (0, 1)
    examine(None, anew=True)
    assert len(asked) == 2


LORA = {"kind": "lora", "rank": 4}


def config(**changes):
    return run_config(**{"model": "base", "adapter": LORA, "data": {"train": "rows.json"}, "output": "out"} | changes)


def values(found):
    return {one.code: one.value for one in found}


def test_every_code_has_a_line_and_none_has_two():
    seen = [ok("DISK", "enough"), caution("PLAN", "said", "fix")]
    found = rest(config(), seen)
    assert all(one.verdict == "ok" and one.value for one in found)
    assert sorted([one.code for one in found] + ["DISK", "PLAN"]) == sorted(CODES)


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({"adapter": {"kind": "dora", "rank": 4}}, {"ROW-ZERO-NORM"}),
        ({"adapter": None}, {"ADAPTER-TARGETS"}),
        ({"stage": "ppo"}, {"TOK-STOP", "LABEL-NONE", "LOSS-FALLING"}),
    ],
)
def test_the_reason_is_that_of_the_config(changes, other):
    usual, found = values(rest(config(), [])), values(rest(config(**changes), []))
    assert {code for code in found if found[code] != usual[code]} == other
