"""Before step 1 every fast path is held against the plain one; one that differs is not used, and the run says so."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest

from helpers.faults import lines_giving, raises_fault
from helpers.growing_records import write_sky
from helpers.path_runs import fast_paths, forget, losses, path_config, saved_plan, start, weights
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.models.fast import adapters as fast_adapters
from surefoot.planning.plan import KernelsPlan
from surefoot.runs.make_plan import make_plan
from surefoot.runs.parity.fast_paths import planned_paths
from surefoot.system.errors import EnvironmentFault

DORA = {"kind": "dora", "rank": 4}
PREFERENCES = [{"prompt": f"Say {n}.", "chosen": "sky " * n, "rejected": "sea"} for n in range(1, 9)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_sky(folder, 8)
    (folder / "pairs.json").write_text(json.dumps(PREFERENCES))
    tiny_llama(folder / "base")
    return folder


def config(workplace, output, **way):
    return path_config(workplace, output, **({"adapter": DORA} | way))


def recorded(folder):
    """What environment.json says of the adapter's path, and what plan.json does."""
    return fast_paths(folder)["adapter"], saved_plan(folder).kernels.adapter


def last_weights(folder):
    return weights(folder / "checkpoint-2")


def break_scale(monkeypatch):
    plain = fast_adapters._up
    monkeypatch.setattr(fast_adapters, "_up", lambda *given: plain(*given) * 1.5)


@pytest.mark.parametrize("precision", representatives(["fp32", "bf16"], "bf16"))
def test_a_path_that_computes_the_same_is_used(workplace, tmp_path, precision):
    screen = start(config(workplace, tmp_path / "run", precision=precision))
    found, choice = recorded(tmp_path / "run")
    assert found["used"]
    assert all(found["differs"][name] < limit for name, limit in found["limits"].items())
    assert choice.value == "fast"
    assert "caution: kernels" not in screen


REHEARSED = [("reward", {}), ("dpo", {}), ("dpo", {"alignment": {"reference": "cached"}})]


@pytest.mark.parametrize(("stage", "more"), representatives(REHEARSED, REHEARSED[2]), ids=str)
def test_stages_that_lack_something_before_step_1_are_rehearsed_without_it(workplace, tmp_path, stage, more):
    start(config(workplace, tmp_path / "run", stage=stage, rows="pairs.json", **more))
    found, _ = recorded(tmp_path / "run")
    assert found["used"]


def test_one_that_differs_is_taken_out_and_the_run_is_the_plain_one_also_when_it_goes_on(
    workplace, tmp_path, monkeypatch
):
    plain = config(workplace, tmp_path / "plain", kernels={"adapter": "plain", "loss": "plain"})
    start(plain)
    break_scale(monkeypatch)
    broken = config(workplace, tmp_path / "run", kernels={"adapter": "auto", "loss": "plain"})
    screen = start(broken)
    assert lines_giving(screen, "caution:", "kernels.adapter:", "fast")
    found, choice = recorded(tmp_path / "run")
    assert not found["used"]
    assert found["differs"]["gradient"] > found["limits"]["gradient"]
    assert (choice.value, choice.source) == ("plain", "measured")
    assert last_weights(tmp_path / "run") == last_weights(tmp_path / "plain")
    monkeypatch.undo()  # now it would pass; the saved plan decides
    forget(tmp_path / "run", [2])
    start(broken, "resume")
    assert last_weights(tmp_path / "run") == last_weights(tmp_path / "plain")


def test_twin_where_b_is_0_another_scale_would_not_be_seen(workplace, tmp_path, monkeypatch):
    break_scale(monkeypatch)
    monkeypatch.setattr("surefoot.runs.parity.fast_paths.nonzero_matrices", lambda parameters: nullcontext())
    start(config(workplace, tmp_path / "run", duration="1 step"))
    assert recorded(tmp_path / "run")[0]["used"]


def test_one_that_fails_is_taken_out(workplace, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("gradient\nmore")

    monkeypatch.setattr(fast_adapters, "adapted", fail)
    screen = start(config(workplace, tmp_path / "run"))
    assert lines_giving(screen, "kernels.adapter:", "fast", "gradient")
    assert recorded(tmp_path / "run")[1].value == "plain"


def lose_all_chunks_but_the_first(monkeypatch, rows):
    """rows: of a chunk where it is compared."""
    monkeypatch.setattr("surefoot.runs.parity.fast_paths._ROWS", rows)
    monkeypatch.setattr("surefoot.kernels.chunked_loss.range", lambda start, stop, step: [start], raising=False)


def test_a_loss_that_is_right_in_its_first_chunk_alone_is_taken_out(workplace, tmp_path, monkeypatch):
    lose_all_chunks_but_the_first(monkeypatch, 4)
    start(config(workplace, tmp_path / "run", duration="1 step"))
    assert saved_plan(tmp_path / "run").kernels.loss.value == "plain"


def test_twin_in_chunks_as_long_as_those_of_the_run_it_would_not_be_seen(workplace, tmp_path, monkeypatch):
    lose_all_chunks_but_the_first(monkeypatch, 256)
    start(config(workplace, tmp_path / "run", duration="1 step"))
    assert saved_plan(tmp_path / "run").kernels.loss.value == "chunked"


def test_one_that_was_asked_for_by_name_and_differs_ends_the_run(workplace, tmp_path, monkeypatch):
    break_scale(monkeypatch)
    with pytest.raises(EnvironmentFault) as caught:
        start(config(workplace, tmp_path / "run", kernels={"adapter": "fast"}))
    [fault] = caught.value.faults
    assert fault.where == "kernels.adapter"
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_paths_outside_their_limit_and_ends_as_if_it_had_never_stopped(
    workplace, tmp_path, monkeypatch
):
    """On the weights of later steps a comparison can come out otherwise. It must not change the run."""
    wanted = config(workplace, tmp_path / "run")
    start(wanted)
    uninterrupted, choice = last_weights(tmp_path / "run"), recorded(tmp_path / "run")[1]
    monkeypatch.setattr("surefoot.runs.parity.differences.LIMITS", dict.fromkeys(("fp32", "bf16", "fp16"), -1.0))
    forget(tmp_path / "run", [2])
    screen = start(wanted, "resume")
    assert lines_giving(screen, "caution:", "kernels.adapter:", "fast", -1)
    found, now = recorded(tmp_path / "run")
    assert (found["used"], found["outside"], now) == (True, True, choice)
    assert found["differs"]["gradient"] > found["limits"]["gradient"]
    assert last_weights(tmp_path / "run") == uninterrupted
    start(config(workplace, tmp_path / "fresh"))  # twin: a fresh start falls back, and has other bytes
    assert recorded(tmp_path / "fresh")[1].value == "plain"
    assert last_weights(tmp_path / "fresh") != uninterrupted


def test_a_resumed_run_ends_where_its_path_fails(workplace, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("one of the variables needed for gradient computation")

    wanted = config(workplace, tmp_path / "run")
    start(wanted)
    before = (tmp_path / "run" / "plan.json").read_bytes()
    forget(tmp_path / "run", [2])
    monkeypatch.setattr(fast_adapters, "adapted", fail)
    with raises_fault("SF-FAST-PATH", "kernels.adapter", "fast"):
        start(wanted, "resume")
    assert (tmp_path / "run" / "plan.json").read_bytes() == before


def test_the_forecast_of_a_resumed_run_counts_on_the_paths_that_it_has(workplace, tmp_path, monkeypatch):
    break_scale(monkeypatch)
    changed = {"batch": {"size": 4, "micro": 1}, "duration": "3 steps"}
    start(config(workplace, tmp_path / "run"))  # falls back
    assert recorded(tmp_path / "run")[1].value == "plain"
    start(config(workplace, tmp_path / "run", **changed), "resume")
    monkeypatch.undo()
    forecasts = [saved_plan(tmp_path / "run").memory.activations]
    for way in ("plain", "fast"):
        start(config(workplace, tmp_path / way, kernels={"adapter": way}, **changed))
        forecasts.append(saved_plan(tmp_path / way).memory.activations)
    resumed, plain, fast = forecasts
    assert resumed == plain
    assert plain != fast  # twin


def test_both_paths_end_alike(workplace, tmp_path):
    """The gate looks at one step; two steps of both differ by rounding alone."""
    for name in ("plain", "auto"):
        start(config(workplace, tmp_path / name, kernels={"adapter": name}, optim={"lr": 1e-2}, duration="4 steps"))
    plain, auto = losses(tmp_path / "plain"), losses(tmp_path / "auto")
    assert auto == pytest.approx(plain, rel=1e-4)
    assert plain[-1] < plain[0]


def test_plans_of_before_have_plain_paths(workplace, tmp_path):
    plan = make_plan(config(workplace, tmp_path / "run"))
    assert [path.name for path in planned_paths(plan)][-1] == "adapter"
    assert KernelsPlan().adapter.value == "plain"


def test_a_plan_with_fast_paths_under_an_engine_that_cuts_parameters_is_refused(workplace, tmp_path):
    plan = make_plan(config(workplace, tmp_path / "run"))
    assert [path.name for path in planned_paths(plan)] == ["loss", "last_block", "adapter"]  # twin: whole parameters
    parallel = replace(plan.parallel, engine=replace(plan.parallel.engine, value="fsdp2"))
    with pytest.raises(EnvironmentFault) as caught:
        planned_paths(replace(plan, parallel=parallel))
    assert [fault.where for fault in caught.value.faults] == [
        "kernels.adapter",
        "kernels.loss",
        "kernels.last_block",
    ]
