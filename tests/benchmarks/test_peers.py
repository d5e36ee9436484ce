"""The comparison with other trainers as a program: what it asks, who is counted, what becomes of a side that fails."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fresh
import memory
import peer_world
import peers
from helpers.benchmark_programs import RECORDS, ROOT, asked
from surefoot.system.durable import write_json


@pytest.fixture
def data(tmp_path):
    write_json(tmp_path / "data.json", RECORDS)
    return tmp_path / "data.json"


def checked(data, *words, gpu: bool, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "so that what is set here is taken back, also where nothing was")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    call = asked("--data", str(data), *words)
    call.device = peers.arguments().parse_args(words).device
    return peers.checked(call)


@pytest.mark.parametrize(
    ("words", "gpu", "device", "hidden"),
    [
        ([], False, "cpu", None),
        ([], True, "cuda", None),
        (["--device", "cpu"], True, "cpu", ""),
        (["--device", "cpu"], False, "cpu", None),
    ],
)
def test_the_device_is_the_gpu_where_there_is_one(data, monkeypatch, words, gpu, device, hidden):
    import os

    assert checked(data, *words, gpu=gpu, monkeypatch=monkeypatch).device == device
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == hidden


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda"], "--device: torch sees no GPU here"),
        (["--batch", "8", "--micro", "3"], "--micro: a part of --batch, 8, that goes into it without a rest"),
        (["--batch", "8", "--micro", "0"], "--micro: a part of --batch, 8, that goes into it without a rest"),
        (["--batch", "9"], "--batch: a multiple of 8, so that peers have whole micro-batches"),
        (["--steps", "2"], "--steps: more than 2"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(data, monkeypatch, words, said):
    with pytest.raises(SystemExit) as fault:
        checked(data, *words, gpu=False, monkeypatch=monkeypatch)
    assert fault.value.code == said


def test_worlds_keep_their_names_unless_something_unusual_is_asked_for(data):
    usual = asked("--data", str(data), "--batch", "16")
    name = peer_world.name_of(usual)
    assert name.rpartition("-")[0] == "small-lora-short-b16-s5"
    others = [["--length", "256"], ["--rank", "16"], ["--league", "equal"], ["--template", "vicuna"], ["--steps", "6"]]
    names = {peer_world.name_of(asked("--data", str(data), "--batch", "16", *words)) for words in others}
    assert len(names | {name}) == len(others) + 1


def test_losses_are_compared_as_far_as_the_reference_goes():
    assert peers.off_by([1.0, 2.0, 9.0], [1.0, 2.0]) == 0.0
    assert peers.off_by([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert peers.off_by([1.0, None], [1.0, 2.0]) == float("inf")
    with pytest.raises(ValueError):
        peers.off_by([1.0], [1.0, 2.0])


def test_of_a_large_model_the_first_losses_count():
    assert peers.parity_steps(asked("--size", "8b", "--steps", "8")) == 1
    assert peers.parity_steps(asked("--size", "small", "--steps", "8")) == 8


def compared(losses, own=(2.0, 1.9, 1.8)):
    beside = {"norms": [1.0], "rate": None, "needed": [1.0] * 3, "seconds": [1.0] * 3, "processor": [1.0] * 3}
    beside |= {"memory": 1, "first_step": 1.0, "versions": {}, "threads": 1}
    world = SimpleNamespace(tokens=[1] * 3)
    turns = [[{**beside, "losses": list(one)}] for one in (losses, own)]
    return peers._row("one", turns[0], world, {"losses": [2.0], "norms": [1.0]}, turns[1])  # pyright: ignore[reportArgumentType]


def test_where_the_reference_ends_losses_are_compared_with_surefoots():
    assert compared([2.0, 1.9, 1.8])["off"] == 0.0
    assert compared([2.0, 1.9, 1.62])["off"] == pytest.approx(0.1)
    assert compared([2.2, 1.9, 1.8])["off"] == pytest.approx(0.1)
    assert compared([2.0, 1.9, 1.8], own=(2.0, 1.9, None))["off"] == float("inf")


def test_a_reference_of_fewer_steps_is_taken_anew(tmp_path):
    world, taken = peer_world.World(tmp_path, [1], [1]), []

    def compute(steps: int):
        taken.append(steps)
        return {"losses": [1.0] * steps, "norms": [1.0] * steps}

    for steps in (2, 2, 1, 3):
        assert len(world.reference(steps, lambda steps=steps: compute(steps))["norms"]) >= steps
    assert taken == [2, 3]


TURN = {"seconds": [9.0, 9.0, 1.0], "processor": [9.0, 9.0, 1.0], "load_before": 0.0}


def take_turns(take, rounds=2, left=lambda: float("inf"), now=lambda: 0.0):
    sides = [SimpleNamespace(name=name) for name in ("surefoot", "one", "two")]
    return peers.take_turns(sides, rounds, take, left=left, now=now)  # pyright: ignore[reportArgumentType]


def test_a_peer_that_breaks_off_is_named_and_the_others_go_on(capsys):
    def take(side):
        if side.name == "one":
            raise fresh.BrokeOff("Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB")
        return TURN

    found, broken = take_turns(take)
    assert {name: len(turns) for name, turns in found.items()} == {"surefoot": 2, "two": 2}
    assert broken == {"one": "broke off: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB"}
    assert capsys.readouterr().out.count("broke off") == 1


def test_twin_without_surefoot_there_is_nothing_to_compare():
    def take(side):
        raise fresh.BrokeOff("no")

    with pytest.raises(fresh.BrokeOff):
        take_turns(take)


def test_no_turn_begins_that_would_outlast_the_time():
    clock = [0.0]

    def take(side):
        clock[0] += 60.0
        return TURN

    def within(seconds):
        clock[0] = 0.0
        return take_turns(take, left=lambda: seconds - clock[0], now=lambda: clock[0])

    found, broken = within(130.0)
    assert (list(found), clock[0]) == (["surefoot", "one"], 120.0)
    assert broken == {"two": "left out: no time"}
    found, broken = within(200.0)
    assert (list(found), clock[0], broken) == (["surefoot", "one", "two"], 180.0, {})


def row(name: str, rate: float, off: float = 0.0, reserved: int | None = None) -> dict:
    return {
        "name": name,
        **dict.fromkeys(("rate", "least", "most"), rate),
        "by_processor": 1.0,
        "of_limit": 0.5,
        "memory": 2**30,
        "reserved": reserved,
        "first_step": 1.0,
        "off": off,
        "norm_off": 0.0,
        "losses": [1.0, 2.0, 3.0],
        "versions": {"torch": "2.13.0", "triton": "3.7.1"},
    }


def shown(device: str, rows: list[dict], capsys) -> str:
    call = {"league": "equal", "adapter": "lora", "size": "8b", "batch": "8", "threads": "1", "device": device}
    here = {
        "name": "NVIDIA H200",
        "cores": "16",
        "date": "2026-11-22",
        "cuda": "13.0",
        "cudnn": "91900",
        "driver": "580",
    }
    found = {"rows": rows, "asked": call, "machine": here, "tokens": [8] * 3, "reference": [1.0, 2.0]}
    peers.show(found | {"broken": {"Unsloth, micro 4": "broke off: CUDA out of memory"}})
    return capsys.readouterr().out


def test_a_table_of_a_gpu_names_it_and_what_is_reserved(capsys):
    text = shown("cuda", [row("surefoot", 200.0, reserved=3 * 2**30), row("HF", 100.0, reserved=5 * 2**30)], capsys)
    assert "NVIDIA H200, 16 cores, cuda 13.0, cudnn 91900, driver 580, torch 2.13.0, triton 3.7.1" in text
    assert " 3,072\n" in text
    assert " 5,120\n" in text
    assert "Unsloth, micro 4: broke off: CUDA out of memory" in text
    assert "2.00 times the tokens/s" in text
    assert "processor time" not in text


def test_twin_a_side_without_parity_gives_no_ratio(capsys):
    text = shown("cuda", [row("surefoot", 200.0, reserved=1), row("HF", 100.0, off=0.01, reserved=1)], capsys)
    assert "NO PARITY: not counted" in text
    assert "no ratio" in text


def test_a_table_of_a_cpu_has_the_time_of_processors(capsys):
    text = shown("cpu", [row("surefoot", 200.0), row("HF", 100.0)], capsys)
    assert "times by processor time" in text
    assert "reserved" not in text


def test_a_command_that_fails_ends_the_program_with_its_last_words():
    code = "from fresh import told_by; import sys; told_by([sys.executable, '-c', 'raise ValueError(42)']); print('on')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: 42" in done.stderr
    assert "on" not in done.stdout


def test_memory_is_compared_on_a_gpu_by_what_torch_allocated(monkeypatch):
    plan = SimpleNamespace(
        memory=SimpleNamespace(total=1000, **dict.fromkeys(memory.PARTS, 0)), kernels=SimpleNamespace()
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1130)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2000)
    found = memory._found(plan, None, "cuda", before=30, code=0)
    assert (found["forecast"], found["peak"], found["reserved"]) == (1000, 1100, 2000)
    assert "reserved" not in memory._found(plan, torch.nn.Linear(1, 1), "cpu", before=0, code=0)


def test_a_gpu_gets_the_same_cases_and_a_larger_model():
    (small, lengths), (more, same) = (memory.cases(device, packed=False) for device in ("cpu", "cuda"))
    assert lengths == same
    assert list(more) == [*small, "1.2 B"]
