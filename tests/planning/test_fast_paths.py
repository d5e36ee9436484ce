"""Which adapters run by surefoot's own arithmetic, and what is said where they do not."""

import pytest

from plans import adapter_plan
from surefoot.config.schema import KernelsConfig
from surefoot.planning.fast_paths import plan_kernels
from surefoot.planning.notes import Notes

USUAL = {"stage": "sft", "head": "lm_head", "packed": False, "engine": "single", "compiled": False}


def planned(asked="auto", adapter=adapter_plan(["q_proj"]), **changes):  # noqa: B008  # frozen
    notes = Notes()
    kernels = plan_kernels(KernelsConfig(adapter=asked), adapter, **(USUAL | changes), notes=notes)
    return kernels.adapter, [fault.where for fault in notes.faults]


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_auto_is_fast_where_weights_are_whole(kind, engine):
    choice, faults = planned(adapter=adapter_plan(["q_proj"], kind), engine=engine)
    assert (choice.value, choice.source, faults) == ("fast", "default", [])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"packed": True}, "nf4"),
        ({"engine": "fsdp2"}, "fsdp2 hands each module its weights"),
        ({"engine": "deepspeed"}, "deepspeed hands each module its weights"),
        ({"compiled": True}, "torch.compile"),
        ({"adapter": None}, "no adapter"),
    ],
)
def test_where_it_cannot_run_auto_is_plain_and_a_request_is_refused(changes, why):
    choice, faults = planned(**changes)
    assert (choice.value, faults) == ("plain", [])
    assert why in choice.reason
    assert planned("fast", **changes)[1] == ["kernels.adapter"]


@pytest.mark.parametrize("asked", ["plain", "fast"])
def test_a_request_is_honoured(asked):
    choice, faults = planned(asked)
    assert (choice.value, choice.source, faults) == (asked, "user", [])
