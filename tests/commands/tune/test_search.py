"""What a search begins with is the plan's own choice, and what it varies reaches every form that a plan can take.
The search finds what a full grid finds, in a fraction of its trials; settings that do not pass are never taken.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import pytest

from helpers.model_layouts import LLAMA2_7B, llama2_tokenizer, model_facts
from surefoot.commands.tune.search import GAIN, Axis, Search, Space, Tried, better, given_keys, make_space
from surefoot.commands.tune.trials import with_settings
from surefoot.config.load import check_config
from surefoot.planning.measurements import AttentionTrial, LengthFacts, Measurements, measurements_to_json
from surefoot.planning.plan import diff_plans
from surefoot.runs.make_plan import make_plan
from surefoot.system.hardware import preset

LENGTHS = LengthFacts(longest=300, typical=200, mean=100.0, mix=(50, 100, 200), padding=0.3)
PACKED = (AttentionTrial("matmul", 0.01, ""), AttentionTrial("sdpa", 0.03, ""), AttentionTrial("padded", 0.02, ""))
PADDED = (AttentionTrial("matmul", 0.09, ""), AttentionTrial("sdpa", 0.08, ""), AttentionTrial("padded", 0.01, ""))


@pytest.fixture
def given(tmp_path):
    model_facts(tmp_path / "base", LLAMA2_7B | {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512})
    llama2_tokenizer(tmp_path / "base")
    (tmp_path / "rows.json").write_text('[{"text": "anything"}]')
    return {
        "stage": "sft",
        "model": {"path": str(tmp_path / "base")},
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(tmp_path / "rows.json"), "max_length": 512},
        "batch": {"size": 8},
        "duration": "3 steps",
        "output": str(tmp_path / "run"),
    }


def plan_of(config, documents):
    seen = measurements_to_json(Measurements(documents=documents))
    return make_plan(check_config(config), hardware=preset("cpu"), measurements=seen, lengths=LENGTHS)


def space_of(given, documents):
    plan = plan_of(given, documents)
    return plan, make_space(check_config(given), set(given_keys(given)), plan, preset("cpu"), Measurements())


@pytest.mark.parametrize(("documents", "form"), [(PACKED, "matmul"), (PADDED, "plain")])
def test_the_start_plans_what_the_config_plans(given, documents, form):
    plan, space = space_of(given, documents)
    assert plan.kernels.documents.value == form
    assert not diff_plans(plan, plan_of(with_settings(given, space.start), documents))


def test_twin_a_start_that_names_sdpa_plans_another_form_of_packed_rows(given):
    plan, space = space_of(given, PACKED)
    named = plan_of(with_settings(given, {**space.start, "attention.implementation": "sdpa"}), PACKED)
    assert {one.path: one.new for one in diff_plans(plan, named)}["kernels.documents.value"] == "sdpa"


def test_both_forms_are_among_the_values(given):
    _, space = space_of(given, PACKED)
    [values] = [axis.values for axis in space.axes if axis.key == "attention.implementation"]
    forms = {
        plan_of(
            with_settings(given, {**space.start, "attention.implementation": value}), PACKED
        ).kernels.documents.value
        for value in values
        if value != "eager"
    }
    assert forms == {"matmul", "sdpa"}


AXES = (
    Axis("precision.compute", ("fp32", "bf16")),
    Axis("data.packing", ("off", "on")),
    Axis("attention.implementation", ("sdpa", "eager")),
    Axis("batch.micro", (1, 2, 4, 8, 16), ordered=True),
    Axis("gradient_checkpointing", ("off", "on")),
    Axis("data.workers", (0, 1), ordered=True),
)
START = {axis.key: axis.values[0] for axis in AXES}


def grid(axes):
    """Every combination of the axes' values."""
    names = [axis.key for axis in axes]
    return [dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in axes))]


CLOSE = 0.95  # of the grid's best rate
PART = 0.25  # of the grid's trials


def machine(best_size: int, eager: float, packing: float, *, memory: int = 99) -> Callable[[Mapping], Tried]:
    """A machine on which the rate rises to a size and falls beyond it; packing moves that size, as on real ones."""

    def attempt(settings: Mapping) -> Tried:
        if settings["batch.micro"] > memory and settings["gradient_checkpointing"] == "off":
            return Tried(settings, failure="too large", short_of_memory=True)
        rate = 1000.0 * (3.0 if settings["precision.compute"] == "bf16" else 1.0)
        rate *= eager if settings["attention.implementation"] == "eager" else 1.0
        packed = settings["data.packing"] == "on"
        rate *= packing if packed else 1.0
        rate *= 0.75 if settings["gradient_checkpointing"] == "on" else 1.0
        off = math.log2(settings["batch.micro"]) - math.log2(best_size / 2 if packed else best_size)
        return Tried(settings, rate * math.exp(-0.3 * abs(off)), memory=settings["batch.micro"])

    return attempt


MACHINES = list(itertools.product((2, 8, 16), (0.6, 1.3), (0.9, 1.4)))


@pytest.mark.parametrize(("size", "eager", "packing"), MACHINES)
def test_finds_what_the_grid_finds_in_a_quarter_of_its_trials(size, eager, packing):
    attempt = machine(size, eager, packing)
    search = Search(Space(AXES, START, ()), attempt, lambda one: None)
    found = search.run()
    everything = [attempt(settings) for settings in grid(AXES)]
    assert found.rate >= CLOSE * max(one.rate for one in everything)
    assert len(search.tried) <= PART * len(everything)


def test_twin_a_search_that_never_looks_at_the_size_misses_it():
    attempt = machine(16, 0.6, 1.4)
    axes = tuple(axis for axis in AXES if axis.key != "batch.micro")
    found = Search(Space(axes, START, ()), attempt, lambda one: None).run()
    assert found.rate < CLOSE * max(attempt(settings).rate for settings in grid(AXES))


def test_memory_is_bought_with_checkpointing_only_where_it_ran_out():
    search = Search(Space(AXES, START, ()), machine(16, 0.6, 0.9, memory=2), lambda one: None)
    assert search.run().settings["gradient_checkpointing"] in ("off", "on")
    assert any(one.settings["gradient_checkpointing"] == "on" for one in search.tried)
    search = Search(Space(AXES, START, ()), machine(16, 0.6, 0.9), lambda one: None)
    search.run()
    assert all(one.settings["gradient_checkpointing"] == "off" for one in search.tried), "twin: it did not"


def test_what_a_failure_says_decides_nothing():
    def attempt(settings: Mapping) -> Tried:
        found = machine(16, 0.6, 0.9, memory=2)(settings)
        return replace(found, short_of_memory=False, failure=found.failure and "not enough memory")

    search = Search(Space(AXES, START, ()), attempt, lambda one: None)
    search.run()
    assert all(one.settings["gradient_checkpointing"] == "off" for one in search.tried)


def test_nothing_is_tried_twice_and_everything_is_told():
    told = []
    search = Search(Space(AXES, START, ()), machine(4, 1.3, 1.4), told.append)
    search.run()
    assert told == search.tried
    assert len({str(one.settings) for one in told}) == len(told)


def test_a_value_brings_what_it_needs_along():
    """Eager attention, by far the fastest here, knows no packed rows, in which the search begins."""
    quick = machine(4, 5.0, 1.4)

    def attempt(settings: Mapping) -> Tried:
        if settings["data.packing"] == "on" and settings["attention.implementation"] == "eager":
            return Tried(settings, failure="attention: eager was asked for")
        return quick(settings)

    def found(needs):
        axes = tuple(replace(axis, needs=needs) if axis.key.startswith("attention") else axis for axis in AXES)
        best = Search(Space(axes, START | {"data.packing": "on"}, ()), attempt, lambda one: None).run().settings
        assert set(best) == set(START)
        return best["attention.implementation"]

    assert found({"eager": {"data.packing": "off", "not.varied": 1}}) == "eager"
    assert found({}) == "sdpa"  # the twin: what is refused is never timed


def test_settings_that_plan_what_others_did_are_not_told_again():
    one_form = {"sdpa": "eager"}
    quick, known = machine(4, 0.6, 1.4), dict[str, Tried]()

    def attempt(settings: Mapping) -> Tried:
        form = settings["attention.implementation"]
        planned = {**settings, "attention.implementation": one_form.get(form, form)}
        return known.setdefault(str(planned), quick(settings))

    search = Search(Space(AXES, START, ()), attempt, lambda one: None)
    search.run()
    assert {one.settings["attention.implementation"] for one in search.tried} == {"sdpa"}
    assert len(search.tried) == len(set(map(id, search.tried)))
    one_form.clear()  # the twin
    known.clear()
    other = Search(Space(AXES, START, ()), attempt, lambda one: None)
    other.run()
    assert len(other.tried) > len(search.tried)


def test_threads_are_tried_only_where_batches_are_waited_for():
    quick = machine(4, 0.6, 0.9)

    def waits(settings):
        one = quick(settings)
        return Tried(one.settings, one.rate, one.memory, waiting=0.1)

    for attempt, tried in ((quick, {0}), (waits, {0, 1})):
        search = Search(Space(AXES, START, ()), attempt, lambda one: None)
        search.run()
        assert {one.settings["data.workers"] for one in search.tried} == tried


def test_only_what_passed_and_is_clearly_faster_replaces():
    start = Tried({}, 100.0)
    assert better(start, Tried({"a": 1}, 100.0 * GAIN)) is start, "noise"
    faster = Tried({"a": 1}, 101.0 * GAIN)
    assert better(start, faster) is faster
    assert better(start, Tried({"a": 1}, 900.0, failure="off")) is start
    slow = Tried({"a": 1}, 1.0)
    assert better(Tried({}, failure="killed"), slow) is slow


@pytest.mark.parametrize("too_long", [True, False], ids=["too long", "twin: another fault"])
def test_what_compiled_for_too_long_is_not_compiled_again(too_long):
    """The walk comes by again after another key has changed, when the setting is a new one."""

    def attempt(settings: Mapping) -> Tried:
        if settings["compile"] == "on":
            return Tried(settings, failure="of its own", unfinished=too_long)
        return Tried(settings, 2000.0 if settings["attention.implementation"] == "eager" else 1000.0)

    axes = (Axis("compile", ("off", "on")), Axis("attention.implementation", ("sdpa", "eager")))
    search = Search(Space(axes, {axis.key: axis.values[0] for axis in axes}, ()), attempt, lambda one: None)
    assert search.run().rate == 2000.0
    assert sum(one.settings["compile"] == "on" for one in search.tried) == (1 if too_long else 2)
