"""What surefoot says of a GPU: forecasts of memory, its probes, and a doctor that finds nothing wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from gpu.devices import CUDA, DEVICES, IN_THE_LONG_TIER, take
from helpers import pretend_gpu
from helpers.doctor_runs import clean_base, clean_run
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.commands.doctor.examine import examine
from surefoot.planning.attention import ORDER
from surefoot.planning.measurements import PADDED, PointwiseSizes
from surefoot.planning.probes.attention import attention_trials
from surefoot.planning.probes.child import run_request
from surefoot.planning.probes.documents import DocumentsRequest
from surefoot.planning.probes.matmul import product_rates, tf32_rate
from surefoot.planning.probes.pointwise import PointwiseRequest, pointwise_trials
from surefoot.planning.probes.sizes import AttentionRequest
from surefoot.planning.probes.timing import copy_rate
from surefoot.runs.kernel_probes import DOCUMENTS, pointwise_ways
from surefoot.runs.trial import run_trial
from surefoot.system.hardware import Hardware, detect

OFF = 0.10  # that a forecast may be off, of the peak


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return clean_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("device", IN_THE_LONG_TIER)
def test_doctor_finds_nothing_wrong_with_a_clean_run(tmp_path, base, monkeypatch, device):
    """Cautions on speed may come of models as tiny as this one."""
    take(device, monkeypatch)
    found = examine(clean_run(tmp_path, base))
    faults = [(one.code, one.where, one.value) for one in found.looked_at if one.verdict == "fault"]
    assert (faults, found.exit_code) == ([], 0)
    assert found.facts["machine"]["device"]["kind"] == device


def probe_all(device: str, dtype, heads, length, rows, shape, mix) -> None:
    """All probes of a model, as doctor and a plan take them together, here and not in processes of their own."""
    kind = torch.device(device)
    on_gpu = device == "cuda"
    rates = product_rates([shape], kind, dtypes=("fp32", dtype))
    if on_gpu and dtype == "bf16":
        assert rates["bf16"] > 2 * rates["fp32"]  # 16 times on an H200; 1.1 times where launches were timed
    tf32_rate([shape], kind)
    copy_rate(kind)
    forms = (*ORDER, "eager") if on_gpu else ("flash", "math", "eager")
    seen = attention_trials(AttentionRequest(forms, *heads, length, dtype, device, rows=rows))
    assert any(trial.passed for trial in seen)
    packed = "varlen" if on_gpu else "matmul"
    packages = detect().packages if on_gpu else ()
    request = DocumentsRequest((packed, *packages, PADDED), mix, *heads, dtype, device, tokens=rows * length)
    first, *others, last = run_request(request, DOCUMENTS)
    assert (first.failure, last.failure) == ("", "")
    assert [trial.form for trial in others] == list(packages)  # right or not: the plan refuses what is not
    if not on_gpu:
        request = PointwiseRequest(("norm", "rotary"), PointwiseSizes(shape[0], heads[0], heads[2]), dtype, device)
        assert not any(trial.failure for trial in pointwise_trials(request, pointwise_ways()))


@pytest.mark.parametrize("device", DEVICES)
def test_probes_run(monkeypatch, device):
    """On a GPU at the shapes of a model of 8 B, on a CPU at a small one's."""
    take(device, monkeypatch)
    small = ((12, 4, 64), 512, 1, (768, 2048), (100, 200, 400))
    large = ((32, 8, 128), 4096, 4, (4096, 14336), (500, 1500, 4000))
    probe_all(device, "bf16" if detect().bf16 else "fp32", *(small if device == "cpu" else large))


def peak_and_forecast(folder, device: str, **changes) -> tuple[int, int]:
    """Bytes of three steps of a run, each of 8 examples of nearly one length."""
    rows = [{"instruction": f"Say {n}.", "input": "", "output": "heron " * (70 + n % 3)} for n in range(32)]
    (folder / "train.json").write_text(json.dumps(rows))
    changes = {"batch": {"size": 16, "micro": 8}, "attention": {"cudnn": "off"}, "precision": "bf16"} | changes
    data = {"train": str(folder / "train.json"), "max_length": 512, "packing": "off"}
    config = clean_run(folder, folder / "base", data=data, **changes)
    trial = run_trial(config, steps=1, rounds=1)
    return trial.memory - workspaces(), trial.forecast


def workspaces() -> int:
    """Bytes that cuBLAS took of torch for itself, one block for each thread that multiplies: 32 MiB on Hopper. A
    forecast counts what the run asks for."""
    if not torch.cuda.is_available() or pretend_gpu.is_here():
        return 0
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


CASES = {
    "lora": {"adapter": {"kind": "lora", "rank": 16}},
    "dora-twice": {"adapter": {"kind": "dora", "rank": 16}, "gradient_checkpointing": "on"},
    "full": {"adapter": None},
    "full-fp32": {"adapter": None, "precision": "fp32"},
    "offloaded": {"adapter": None, "parallel": {"offload": "optimizer"}},
}


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("case", CASES)
def test_the_forecast_of_a_gpus_memory(tmp_path, monkeypatch, device, case):
    """Of a model whose activations outweigh what the libraries take for themselves."""
    tiny_llama(tmp_path / "base", pad=True, layers=8, hidden=1024, heads=16, kv_heads=4)
    take(device, monkeypatch)
    peak, forecast = peak_and_forecast(tmp_path, device, **CASES[case])
    assert abs(forecast / peak - 1) <= OFF, f"forecast {forecast / 2**20:.0f} MiB, peak {peak / 2**20:.0f}"


@pytest.mark.parametrize("case", representatives(CASES, "dora-twice"))
def test_the_cases_of_the_forecast_run(tmp_path, monkeypatch, case):
    """On the CPU, where the memory of a process that has done other things means nothing."""
    tiny_llama(tmp_path / "base", pad=True)
    take("cpu", monkeypatch)
    peak, forecast = peak_and_forecast(tmp_path, "cpu", **CASES[case])
    assert peak >= 0
    assert forecast > 0


def test_a_gpu_that_is_there_is_described(monkeypatch):
    """By what torch says of one, on any machine."""
    properties = type("Properties", (), {"name": "GPU", "major": 9, "minor": 0, "total_memory": 2**37})
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda device: (2**36, 2**37),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    found = detect()
    assert isinstance(found, Hardware)
    assert replace(
        found, flash_attention_2=None, liger=None, packages=(), host=None, host_free=None, cores=1
    ) == Hardware("GPU", "cuda", 2**37, (9, 0), True, True, True, 1, preset=False, free=2**36)
