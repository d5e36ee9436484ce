"""Which adapters run by surefoot's own arithmetic, and what is said where they do not."""

import dataclasses

import pytest

from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning.resolve import resolve
from surefoot.system.errors import InputError
from surefoot.system.hardware import preset

LORA = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def planned_kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = model_facts(folder, LLAMA31_8B), read_tokenizer_facts(llama3_tokenizer(folder))
    machine = dataclasses.replace(preset("h100"), memory=2**40)

    def planned(**request):
        return resolve(run_config(**request), model, tokenizer, machine, measurements=None, environment={}).kernels

    return planned


@pytest.fixture
def planned(planned_kernels):
    def planned(asked="auto", **request):
        return planned_kernels(**({"adapter": LORA, "kernels": {"adapter": asked}} | request)).adapter

    return planned


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_auto_is_fast_where_weights_are_whole(planned, kind):
    choice = planned(adapter=LORA | {"kind": kind})
    assert (choice.value, choice.source) == ("fast", "default")


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"precision": {"base": "nf4"}}, "nf4"),
        ({"parallel": {"engine": "fsdp2"}}, "fsdp2 hands each module its weights"),
        ({"parallel": {"engine": "deepspeed"}}, "deepspeed hands each module its weights"),
        ({"compile": "default"}, "torch.compile"),
        ({"adapter": None}, "no adapter"),
    ],
    ids=str,
)
def test_where_it_cannot_run_auto_is_plain_and_a_request_is_refused(planned, request_, why):
    choice = planned(**request_)
    assert choice.value == "plain"
    assert why in choice.reason
    with pytest.raises(InputError) as caught:
        planned("fast", **request_)
    assert "kernels.adapter" in [fault.where for fault in caught.value.faults]


@pytest.mark.parametrize("asked", ["plain", "fast"])
def test_a_request_is_honoured(planned, asked):
    choice = planned(asked)
    assert (choice.value, choice.source) == (asked, "user")


@pytest.fixture
def last_block(planned_kernels):
    def last_block(asked="auto", **request):
        return planned_kernels(kernels={"last_block": asked}, **request).last_block

    return last_block


@pytest.mark.parametrize(
    "request_", [{}, {"adapter": LORA}, {"stage": "reward"}, {"precision": {"base": "nf4"}, "adapter": LORA}], ids=str
)
def test_rows_that_nobody_reads_are_left_out_by_default(last_block, request_):
    choice = last_block(**request_)
    assert (choice.value, choice.source) == ("pruned", "default")
    assert last_block("plain", **request_).source == "user"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"stage": "pretrain"}, "all positions"),
        ({"parallel": {"engine": "fsdp2"}}, "fsdp2 has hooks"),
        ({"parallel": {"engine": "deepspeed"}}, "deepspeed has hooks"),
        ({"compile": "default"}, "torch.compile"),
        ({"adapter": LORA | {"dropout": 0.1}}, "dropout"),
        ({"model": {"path": "base", "dropout": 0.1}}, "dropout"),
        ({"bos": {"scale": 0.5}}, "bos.scale"),
    ],
    ids=str,
)
def test_where_other_rows_matter_the_last_block_is_plain(last_block, request_, why):
    choice = last_block(**request_)
    assert choice.value == "plain"
    assert why in choice.reason
    with pytest.raises(InputError) as caught:
        last_block("pruned", **request_)
    assert "kernels.last_block" in [fault.where for fault in caught.value.faults]
