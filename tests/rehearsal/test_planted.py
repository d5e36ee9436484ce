"""Faults as they are made in code that no GPU has run, planted one by one: each is found on the pretend GPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiers import representatives
from rehearsal.runs import (
    BESIDES,
    ON_THE_PRETEND_GPU,
    PER_PASS,
    Died,
    config_of,
    dying,
    make_world,
    started,
    train,
    waits_of_a_step,
)
from surefoot.data.batching import batch
from surefoot.kernels import packed_attention
from surefoot.methods import examples, preference
from surefoot.methods.distill import stored
from surefoot.methods.losses import logprobs
from surefoot.models import bos, forward, value_head
from surefoot.report.verification import compare_folders
from surefoot.runs import steps
from surefoot.system.errors import EnvironmentFault
from surefoot.training import optimizer_state, step
from surefoot.training.engine import replicated
from surefoot.training.routing import Routing

pytestmark = ON_THE_PRETEND_GPU
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("planted"))


def left_on_the_host(field: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        real = batch._moved_fields

        def moved(of: Any, device: torch.device) -> dict[str, Any]:
            return real(of, device) | ({field: getattr(of, field)} if hasattr(of, field) else {})

        patch.setattr(batch, "_moved_fields", moved)

    return plant


def documents_on_the_host(patch: Patch) -> None:
    real = packed_attention.documents_of
    patch.setattr(forward, "documents_of", lambda lengths, device: real(lengths, torch.device("cpu")))


def places_on_the_host(patch: Patch) -> None:
    real = forward.position_ids
    patch.setattr(forward, "position_ids", lambda lengths, device: real(lengths, torch.device("cpu")))


def reference_on_the_host(patch: Patch) -> None:
    """The log-probabilities of another model's answers."""
    real = logprobs.with_reference

    def with_reference(objective: Any, of: Any) -> Any:
        return real(objective, lambda rows: of(rows).cpu())

    patch.setattr(preference, "with_reference", with_reference)


def scored_on_the_host(patch: Patch) -> None:
    real = value_head.ValueHead.forward
    patch.setattr(value_head.ValueHead, "forward", lambda self, hidden: real(self, hidden).cpu())


def scaled_on_the_host(patch: Patch) -> None:
    real = bos._scaled
    patch.setattr(bos, "_scaled", lambda embedded, starts, scale: real(embedded, starts.cpu(), scale))


def moments_on_the_host(patch: Patch) -> None:
    """After a resume."""
    real = optimizer_state.load_optimizer_tensors

    def load(optimizer: Any, parameters: Any, tensors: Any) -> None:
        real(optimizer, parameters, tensors, place=lambda entry, parameter: entry.clone())

    patch.setattr(replicated, "load_optimizer_tensors", load)


RAISE = {
    "targets on the host": ("lora", left_on_the_host("targets")),
    "ids on the host": ("lora", left_on_the_host("input_ids")),
    "documents on the host": ("packed", documents_on_the_host),
    "places on the host": ("packed", places_on_the_host),
    "values on the host": ("reward", scored_on_the_host),
    "BOS on the host": ("bos", scaled_on_the_host),
    "another model's answers on the host": ("dpo", reference_on_the_host),
    "moments on the host": ("lora", moments_on_the_host),
}


@pytest.mark.parametrize("fault", representatives(RAISE, "targets on the host"))
def test_what_is_left_on_the_host_is_refused(world, fault):
    case, plant = RAISE[fault]
    config, how = started(world, case, fault.replace(" ", "-"))
    config["checkpoint"] = {"every": "1 steps"}
    if resumes := plant is moments_on_the_host:
        with Patch.context() as patch:
            dying(patch, after=1)
            with pytest.raises(Died):
                train(config, **how)
    with Patch.context() as patch:
        plant(patch)
        with pytest.raises(Exception, match="device"):
            train(config, resume=resumes, **how)


def cross_attention_counted(patch: Patch) -> None:
    """With the language model's own: on a GPU a mask takes another kernel."""
    real = steps.attending_to_pictures
    patch.setattr(
        steps, "attending_to_pictures", lambda model: [one for one in real(model) if "Cross" not in type(one).__name__]
    )


@pytest.mark.slow
def test_the_kernel_of_cross_attention_is_its_own(world):
    config, how = started(world, "images-cross", "counted")
    with Patch.context() as patch:
        cross_attention_counted(patch)
        with pytest.raises(EnvironmentFault, match="mem_efficient"):
            train(config, **how)


def read_in_the_loss(patch: Patch) -> None:
    real = step.add_gradient

    def add_gradient(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        assert found["loss"].item() == found["loss"].item()
        return found

    patch.setattr(step, "add_gradient", add_gradient)


def documents_that_wait(patch: Patch) -> None:
    def documents_of(lengths: Any, device: torch.device) -> Any:
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        return packed_attention.Documents(tuple(lengths), ends)

    patch.setattr(forward, "documents_of", documents_of)


def digests_on_the_device(patch: Patch) -> None:
    """Of the examples whose teacher's distributions are stored."""
    patch.setattr(examples, "digested", lambda batch: batch)


def answers_found_on_the_device(patch: Patch) -> None:
    """Of pairs whose log-probabilities under the reference are stored."""
    patch.setattr(preference, "with_digests", lambda *batches: batches)


def counts_that_start_on_the_host(patch: Patch) -> None:
    """Of the tokens that go to each expert."""
    real = Routing.tally

    def tally(self: Routing, seen: Any, rows: Any) -> Any:
        found = real(self, seen, rows)
        return torch.zeros(()).to(found[0].device) + found[0], *found[1:]

    patch.setattr(Routing, "tally", tally)


def distributions_that_wait(patch: Patch) -> None:
    patch.setattr(stored, "_sent", lambda tensor, device: tensor.to(device))


WAITS = [
    ("lora", read_in_the_loss),
    ("packed", documents_that_wait),
    ("distill-stored", digests_on_the_device),
    ("distill-stored", distributions_that_wait),
    ("dpo-cached", answers_found_on_the_device),
    ("experts-balanced", counts_that_start_on_the_host),
]


@pytest.mark.parametrize(("case", "plant"), representatives(WAITS, ("lora", read_in_the_loss)))
def test_a_wait_more_is_named(world, case, plant):
    config, how = started(world, case, plant.__name__)
    with Patch.context() as patch:
        plant(patch)
        waits, _ = waits_of_a_step(config, **how)
    assert set(waits) - PER_PASS - BESIDES.get(case, set())


def seeds_of_the_host_alone(patch: Patch) -> None:
    patch.setattr(step, "seed_micro_batch", lambda seed, number, micro: torch.default_generator.manual_seed(micro))


@pytest.mark.slow
def test_draws_that_do_not_follow_the_step_do_not_resume(world):
    """Dropout of a run whose generator on the device nobody seeds goes on otherwise than it would have."""
    lora = {"kind": "lora", "rank": 4, "dropout": 0.5}
    config = config_of(world, "drawn", adapter=lora, precision="fp32", checkpoint={"every": "1 steps"})
    broken = config | {"output": str(world / "drawn-broken")}
    with Patch.context() as patch:
        seeds_of_the_host_alone(patch)
        train(config)
        with Patch.context() as inner:
            dying(inner, after=2)
            with pytest.raises(Died):
                train(broken)
        train(broken, resume=True)
    assert compare_folders(Path(config["output"]), Path(broken["output"])) != []


def test_numbers_that_are_read_before_they_have_come_are_wrong(world):
    """A look that does not wait: the guard sees what lay in the host's memory before."""
    real = step._to_host

    def look(engine: Any, sums: Any, norms: Any, weight: int, moments: Any) -> Any:
        seen = real(engine, sums, norms, weight, moments)
        early = (sums["loss"] / weight).to("cpu", non_blocking=True)
        return replace(seen, loss=float(early.clone()))

    config = config_of(world, "early", precision="fp32")
    with Patch.context() as patch:
        patch.setattr(step, "_to_host", look)
        rows = train(config)
    assert all(row["loss"] > 1e30 for row in rows)
