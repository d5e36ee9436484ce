"""What the sides of the comparison with other trainers are told, and how their steps are timed."""

import json
import sys
from inspect import signature
from types import MethodType, ModuleType

import pytest
import torch
from transformers import TrainingArguments

import peer_arms
import peer_sides
import peers
from helpers.benchmark_programs import asked
from helpers.tiny_models import llama3_tokenizer, tiny_llama
from surefoot.system import process
from surefoot.system.hardware import process_seconds

SETTINGS = {
    "steps": 1,
    "batch": 2,
    "length": 16,
    "device": "cpu",
    "lr": 1e-3,
    "micro": 2,
    "autocast": False,
    "weights": "fp32",
    "grouped": False,
    "checkpointing": False,
}


def test_trainers_know_all_that_any_side_tells_them(tmp_path):
    call = asked("--size", "1b", "--league", "equal", device="cuda")
    known = signature(TrainingArguments).parameters
    for side in peer_sides.sides(call, 512, has=lambda *_: True, say=lambda text: None)[1:]:
        told = peer_arms._arguments(tmp_path, peers.settings_of(side, call))
        assert set(told) <= set(known), side.name
        assert told["use_cpu"] is False
        assert told["per_device_train_batch_size"] * told["gradient_accumulation_steps"] == call.batch
        assert told.get("use_liger_kernel", False) is ("Liger" in side.name)
        assert told.get("torch_compile", False) is ("compiled" in side.name)


def test_on_a_cpu_trainers_stay_there(tmp_path):
    told = peer_arms._arguments(tmp_path, SETTINGS)
    assert told["use_cpu"] is True
    assert TrainingArguments(**told).device.type == "cpu"


def test_unsloth_is_told_the_adapter_by_short_names():
    config = {
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "down_proj"],
    }
    assert peer_arms.unsloth_adapter(config, checkpointing=False) == {
        "r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["down_proj", "q_proj"],
        "use_gradient_checkpointing": False,
    }
    assert peer_arms.unsloth_adapter({**config, "use_dora": True}, checkpointing=True)["use_dora"] is True
    assert peer_arms.unsloth_adapter(config, checkpointing=True)["use_gradient_checkpointing"] == "unsloth"


class Device:
    """One that computes on while the program goes on, beside a clock that only it moves."""

    def __init__(self) -> None:
        self.now, self.pending = 0.0, 0.0

    def synchronize(self) -> None:
        self.now, self.pending = self.now + self.pending, 0.0


@pytest.fixture
def device(monkeypatch):
    found = Device()
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 700)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 900)
    monkeypatch.setattr(peer_arms.time, "perf_counter", lambda: found.now)
    monkeypatch.setattr(peer_arms, "_of_cuda", lambda: {"gpu": "one"})
    return found


def step(clock, device, before: float, within: float) -> None:
    device.pending = before
    clock.begin()
    device.pending = within
    clock.end()


def test_on_a_gpu_a_step_is_timed_from_rest_to_rest(device):
    clock = peer_arms.Clock({"device": "cuda", "steps": 2})
    step(clock, device, before=7.0, within=3.0)
    step(clock, device, before=0.0, within=2.0)
    found = clock.result()
    assert found["seconds"] == [3.0, 2.0]
    assert (found["memory"], found["reserved"]) == (700, 900)
    assert found["versions"]["gpu"] == "one"


def test_what_is_forgotten_on_the_way_counts(device, monkeypatch):
    clock = peer_arms.Clock({"device": "cuda", "steps": 1})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 800)
    forgotten: list[str] = []
    peer_arms._told_first(forgotten.append, clock)("cuda")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100)
    found = clock.result()
    assert (found["memory"], found["reserved"], forgotten) == (800, 900, ["cuda"])


def test_twin_without_waiting_other_work_would_be_in_the_step(device, monkeypatch):
    monkeypatch.setattr(peer_arms.Clock, "_wait", lambda self: None)
    clock = peer_arms.Clock({"device": "cuda", "steps": 1})
    step(clock, device, before=7.0, within=3.0)
    assert clock.seconds != [3.0]


def test_on_a_cpu_memory_is_the_peak_above_what_was_held_at_first(monkeypatch):
    monkeypatch.setattr(peer_arms, "_status", {"VmRSS": 10, "VmHWM": 50}.__getitem__)
    clock = peer_arms.Clock({"device": "cpu", "steps": 1})
    clock.begin()
    clock.end()
    found = clock.result()
    assert found["memory"] == 40
    assert "reserved" not in found


def test_a_process_is_as_old_as_the_kernel_says():
    assert peer_arms._age() == pytest.approx(process_seconds(), abs=2.0)  # create_time is of whole clock ticks and wall


@pytest.mark.parametrize(
    ("arm", "settings", "again"),
    [("ours", {}, True), ("ours", {"from_python": True}, False), ("trainer", {}, False)],
)
def test_surefoot_alone_begins_as_its_command_line_does(monkeypatch, arm, settings, again):
    seen: list[int] = []
    monkeypatch.setattr(process, "restart_without_thread_cache", lambda: seen.append(1))
    peer_arms.begin(arm, settings)
    assert bool(seen) is again


@pytest.fixture
def world(tmp_path):
    """A base and two examples of one step; no adapter but what a test puts beside."""
    tiny_llama(tmp_path / "base")
    llama3_tokenizer(tmp_path / "base", pad=True)
    tokenizer = tmp_path / "base" / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"pad_token": "<|end_of_text|>"}))
    rows = [{"input_ids": list(range(5, 5 + n)), "labels": [-100, *range(6, 5 + n)]} for n in (9, 12)]
    (tmp_path / "examples.json").write_text(json.dumps([rows]))
    return tmp_path


def put_adapter(world) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world / "base")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(world / "adapter")


def install_liger(monkeypatch, apply) -> None:
    """In place of liger-kernel, of which HF's Trainer asks for one function."""
    package, kernels = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = apply  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernels)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)


def patched(model, **kwargs) -> None:
    plain = type(model).forward

    def forward(self, *args, **kwargs):
        return plain(self, *args, **kwargs)

    forward.__module__ = "liger_kernel.transformers.model.llama"
    model.forward = MethodType(forward, model)


@pytest.mark.parametrize("adapted", [False, True])
def test_liger_goes_below_the_adapter(world, monkeypatch, adapted):
    install_liger(monkeypatch, patched)
    if adapted:
        put_adapter(world)
    found = peer_arms.trainer(world, {**SETTINGS, "liger": True})
    assert len(found["losses"]) == len(found["seconds"]) == 1
    assert found["losses"] == pytest.approx(peer_arms.trainer(world, SETTINGS)["losses"])


def test_twin_a_side_without_its_kernels_is_no_result(world, monkeypatch):
    install_liger(monkeypatch, lambda model, **kwargs: None)
    with pytest.raises(RuntimeError, match="did not put Liger's kernels in"):
        peer_arms.trainer(world, {**SETTINGS, "liger": True})
