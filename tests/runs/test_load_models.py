"""What the plan says of a run is what set-up finds: counts, types, targets, kernels, over all kinds of runs. On a CPU a
run holds as much freed memory as its plan has room for, and no more."""

import dataclasses
from pathlib import Path

import pytest
import torch

from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.models.attention import observe_kernels
from surefoot.runs import load_models as loading
from surefoot.runs.load_models import load_models
from surefoot.runs.make_plan import make_plan
from surefoot.system import process
from surefoot.system.allocator import is_glibc
from surefoot.system.errors import EnvironmentFault

SHORT = {"train": "unused.jsonl", "max_length": 64}
LORA = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {
        "plain": tiny_llama(folder / "plain"),
        "tied": tiny_llama(folder / "tied", tied=True),
        "spare": tiny_llama(folder / "spare", spare_rows=4),
    }


def carried_out(base, change=lambda plan: plan, **request):
    """Plan, set up (which verifies), run one forward pass; the plan and the kernels that ran."""
    config = run_config(model=str(base), data=SHORT, **request)
    plan = change(make_plan(config))
    loaded = load_models(config, plan, Path(base), None)
    ids = torch.tensor([[plan.tokenizer.pad_id, 1, 2, 3]])

    def forward():
        with torch.no_grad(), loaded.settings.kernels(), loaded.settings.forward():
            loaded.model(input_ids=ids, use_cache=False)

    return plan, observe_kernels(forward)


@pytest.mark.parametrize(
    "request_",
    [
        {"adapter": None},
        {"adapter": None, "precision": "fp16"},
        {"adapter": None, "tokenizer": {"pad": "add"}},
        {"adapter": LORA, "precision": "bf16"},
        {"adapter": LORA, "precision": {"compute": "bf16", "base": "fp32"}, "attention": {"flash": "off"}},
        {"adapter": LORA | {"kind": "dora"}, "precision": "fp16", "attention": "eager"},
        {"adapter": LORA | {"modules_to_save": ["lm_head"]}, "gradient_checkpointing": "on"},
        {"adapter": LORA | {"targets": ["q_proj", "model.layers.1.mlp.up_proj"], "modules_to_save": ["norm"]}},
        {"adapter": LORA, "tokenizer": {"pad": "add"}},
        {"adapter": LORA | {"modules_to_save": ["lm_head"]}, "tokenizer": {"pad": "add"}},
        {"adapter": LORA | {"modules_to_save": ["embed_tokens"]}, "tokenizer": {"pad": "add"}},
    ],
)
@pytest.mark.parametrize("name", ["plain", "tied", "spare"])
def test_the_plan_holds(bases, name, request_):
    plan, kernels = carried_out(bases[name], **request_)
    assert kernels == {plan.attention.expected.value}


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: dataclasses.replace(plan, trainable=plan.trainable + 1),
        lambda plan: dataclasses.replace(plan, adapter=dataclasses.replace(plan.adapter, rank=plan.adapter.rank + 1)),
    ],
    ids=["a count that is off by one", "another rank than was counted"],
)
def test_a_plan_that_does_not_hold_is_found(bases, change):
    with pytest.raises(EnvironmentFault):
        carried_out(bases["plain"], change, adapter=LORA)


def kept_of(base, **settings):
    config = run_config(model=str(base), data={"train": "unused.jsonl", "max_length": 64}, **settings)
    plan = make_plan(config)
    done = load_models(config, plan, Path(base), None)
    return getattr(done.settings.after_step, "__self__", None), plan.memory, done.model


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize("left_alone", [False, True], ids=["kept", "twin: the user sets the allocator"])
def test_the_plan_is_the_limit(tmp_path, monkeypatch, left_alone):
    monkeypatch.setattr(process, "settle_allocator", lambda kind: "" if left_alone else "freed memory is kept")
    kept, planned, _ = kept_of(tiny_llama(tmp_path / "base"), precision={"compute": "bf16"}, adapter={"kind": "lora"})
    assert kept is None if left_alone else kept.limit == planned.total


@pytest.mark.skipif(not is_glibc(), reason="glibc's allocator")
@pytest.mark.parametrize("told", [True, False], ids=["told", "twin: not told"])
def test_weights_that_stay_in_their_file_are_no_room_for_freed_memory(tmp_path, monkeypatch, told):
    """The plan counts them and the pages of files are not counted: fp32 on the disk, frozen, and fp32 in the run."""
    monkeypatch.setattr(process, "settle_allocator", lambda kind: "freed memory is kept")
    if not told:
        monkeypatch.setattr(loading, "mapped_bytes", lambda blocks: 0)
    kept, planned, model = kept_of(
        tiny_llama(tmp_path / "base"), precision={"compute": "fp32"}, adapter={"kind": "lora"}
    )
    frozen = sum(one.numel() * one.element_size() for one in model.parameters() if not one.requires_grad)
    assert (planned.total - kept.limit == frozen) == told
