"""The plan as text: complete, aligned, and nothing in it that a terminal would obey."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from helpers.faults import gives, lines_giving
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from helpers.plans import run_plan
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
from surefoot.interop.translation import said_keys
from surefoot.planning.plan import Origin, plan_from_json, plan_to_json
from surefoot.planning.resolve import resolve
from surefoot.planning.scale import ScaleRow
from surefoot.report.tables import plan as plan_tables
from surefoot.report.tables.plan import choice_rows, plan_changes, plan_table, scale_cells, who_and_why
from surefoot.system.hardware import preset

ENVIRONMENT = {"SDPA_BACKEND": "flash\x1b[31m\rX", "ACCELERATE_MIXED_PRECISION": "no"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = model_facts(folder, LLAMA31_8B), read_tokenizer_facts(llama3_tokenizer(folder))
    config = run_config(
        batch={"size": 2}, adapter={"kind": "dora", "rank": 32, "alpha": 64, "modules_to_save": ["lm_head"]}
    )
    return resolve(config, model, tokenizer, preset("h100"), measurements=None, environment=ENVIRONMENT)


def printed(plan, width=120):
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False, emoji=False).print(plan_table(plan))
    return out.getvalue()


def test_every_choice_memory_environment_and_cautions_are_there(plan):
    plan = dataclasses.replace(plan, cautions=("hazard",))
    text = printed(plan)
    for what, value, _, _ in choice_rows(plan):
        assert what in text
        assert value.split(",")[0] in text
    for word in ("weights", "gradients", "optimizer", "activations", "logits", "total"):
        assert word in text
    assert lines_giving(text, "79.1")
    assert all(lines_giving(text, name) for name in ENVIRONMENT)
    assert "caution: hazard" in text


def test_only_what_changed_is_a_change(plan):
    assert plan_changes(plan, plan) == []
    other = dataclasses.replace(
        plan,
        report_to=dataclasses.replace(plan.report_to, value=("wandb",), reason="wanted"),
        memory=dataclasses.replace(plan.memory, weights=plan.memory.weights + 2**30),
    )
    there, back = plan_changes(plan, other), plan_changes(other, plan)
    assert len(there) == len(back) == 2
    assert all(gives(line[0], name) for line in (there, back) for name in ("report_to", "wandb"))
    assert (there[0].endswith(": wanted"), back[0].endswith(": wanted")) == (True, False)  # why it is what it is
    sizes = [re.findall(r"\d[\d.]* [KMGT]iB", line[1]) for line in (there, back)]
    assert sizes[0] == sizes[1][::-1] != sizes[1]


def test_a_dropped_row_would_be_noticed(plan, monkeypatch):
    monkeypatch.setattr("surefoot.report.tables.plan.choice_rows", lambda plan: iter(()))
    with pytest.raises(AssertionError):
        test_every_choice_memory_environment_and_cautions_are_there(plan)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_plain_text_has_no_escape_codes_and_keeps_to_the_width(plan, width):
    text = printed(plan, width)
    assert "\x1b" not in text
    assert "\r" not in text
    assert max(map(len, text.splitlines())) <= width


def test_columns_line_up(plan):
    lines = printed(plan).splitlines()
    place = {lines[0].index(name): name for name in ("choice", "value", "by", "why")}
    for start in place:
        above = [line[start - 1] for line in lines[: len(list(choice_rows(plan)))] if start]
        assert set(above) <= {" "}


def test_full_fine_tuning_has_no_adapter_rows(plan):
    rows = {what: value for what, value, _, _ in choice_rows(dataclasses.replace(plan, adapter=None))}
    assert rows["adapter"] == "none"
    assert "adapter.targets" not in rows


def test_values_as_people_say_them(plan):
    rows = {what: value for what, value, _, _ in choice_rows(plan)}
    assert rows["precision.scaler"] == "off"
    assert rows["tokenizer.pad"] == "<|reserved_special_token_0|> (128002)"
    assert rows["adapter.targets"].split(", ") == [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]
    assert rows["max_length"] == "2048"
    assert rows["batch.micro"] == "2 x 1"
    assert rows["adapter.modules_to_save"] == "lm_head"


@pytest.mark.parametrize(("parameter", "shown"), [("mlp.gate.weight", "gate"), ("mlp.experts.down_proj", "down_proj")])
def test_a_router_is_shown_by_its_module(plan, parameter, shown):
    adapter = dataclasses.replace(
        plan.adapter, targets=dataclasses.replace(plan.adapter.targets, value=()), parameters=(f"layers.0.{parameter}",)
    )
    rows = {what: value for what, value, _, _ in choice_rows(dataclasses.replace(plan, adapter=adapter))}
    assert rows["adapter.targets"] == shown


def test_what_no_word_of_another_tool_says_is_by_the_dialect(plan):
    words = ["finetune.py", "--base_model", "m", "--batch_size", "2", "--micro_batch_size", "1", "--lora_r", "32"]
    found = translate_command(words, Options())
    made = dataclasses.replace(plan, origin=Origin(found.tool, said_keys(found)))
    by = {what: (source, reason) for what, _, source, reason in choice_rows(made)}
    before = {what: (source, reason) for what, _, source, reason in choice_rows(plan)}
    assert before["adapter"][0] == before["batch.size"][0] == before["adapter.scale"][0] == "user"
    assert by["batch.size"] == before["batch.size"]
    assert by["adapter.scale"] == before["adapter.scale"]  # the rank is the user's
    assert by["adapter"][0] == by["adapter.modules_to_save"][0] == "dialect"
    assert {what for what in by if by[what] != before[what]} <= {what for what in by if before[what][0] == "user"}
    assert plan_from_json(plan_to_json(made)) == made
    assert plan_from_json({key: value for key, value in plan_to_json(plan).items() if key != "origin"}) == plan


def test_a_default_of_the_tool_is_not_asked_for():
    tool = Origin("tool", ("data.train", "optim.lr"))
    plan = run_plan(trainable=1, parameters=2)
    made = dataclasses.replace(plan, origin=tool)
    source, why = who_and_why(made, "template", "user", "asked for; seen")
    assert source == "dialect"
    assert [gives(why, word) for word in ("asked", "tool", "seen")] == [False, True, True]
    assert who_and_why(made, "template", "family", "asked for") == ("family", "asked for")
    said = dataclasses.replace(made, origin=Origin("tool", ("data",)))  # a group is said as a whole
    assert who_and_why(said, "template", "user", "asked for") == ("user", "asked for")
    assert who_and_why(made, "threads", "user", "environment") == ("user", "environment")
    assert who_and_why(plan, "template", "user", "asked for") == ("user", "asked for")


def times(compute: float, traffic: float) -> tuple[str, ...]:
    row = ScaleRow(8, "ddp", 2**30, fits=True, checkpointing=False, tokens=4096, compute=compute, traffic=traffic)
    return scale_cells(row)[5:7]


def test_a_short_time_is_not_nothing() -> None:
    assert times(2.618, 0.0) == ("2.62 s", "none")
    assert times(12.5, 0.1) == ("12.50 s", "0.10 s")
    assert times(0.0123456, 0.001) == ("12.3 ms", "1 ms")
    assert times(3.25e-6, 4.51e-4) == ("3.25 µs", "451 µs")


def test_twin_in_seconds_alone_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_tables, "_seconds", lambda value: f"{value:.2f} s")
    assert times(3.25e-6, 0.0) == ("0.00 s", "0.00 s")
    with pytest.raises(AssertionError):
        test_a_short_time_is_not_nothing()
