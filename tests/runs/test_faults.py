"""Out of memory, or a device that fails: exit 3 with advice, the run folder intact; other errors pass as they are."""

import dataclasses
import io
import re

import pytest
import torch

from helpers.faults import gives, lines_giving, raises_fault
from helpers.growing_records import write_sky
from helpers.model_layouts import run_config
from helpers.plans import adapter_plan, precision_plan, run_plan
from helpers.tiny_models import tiny_llama
from surefoot.report.console import Console
from surefoot.runs import run as stage
from surefoot.runs import steps
from surefoot.runs.faults import advice, device_faults, memory_faults
from surefoot.training.failure import is_device_error, is_out_of_memory

HUGE = 2**62 // 4  # numbers that no machine holds


def plan(**changes):
    return dataclasses.replace(run_plan(trainable=1, parameters=1, adapter=adapter_plan(["q_proj"])), **changes)


def real_cpu_error():
    try:
        torch.empty(HUGE, dtype=torch.float32)
    except RuntimeError as error:
        return error
    raise AssertionError("that much memory exists?")


def test_torchs_cpu_allocator_is_recognized():
    assert is_out_of_memory(real_cpu_error())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_so_are_the_others(error):
    assert is_out_of_memory(error)


def test_the_fault_names_the_phase_and_what_was_asked_for():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …")
    with (
        raises_fault("SF-MEMORY", "training", "cpu", "2.00") as caught,
        memory_faults("training", run_config(), plan()),
    ):
        raise error
    assert caught.value.exit_code == 3
    assert caught.value.__cause__ is error


def test_advice_is_what_this_run_can_still_do():
    said = advice(run_config(), plan())
    assert "--resume" in said
    assert re.findall(r"[\w.]+=\w+", said) == ["batch.micro=2", "gradient_checkpointing=on"]
    assert gives(said, 4)
    assert "precision.base: nf4" in said
    packed = plan(precision=precision_plan("bf16", "nf4"))
    assert "nf4" not in advice(run_config(), packed)
    full = plan(adapter=None)
    assert "an adapter" in advice(run_config(), full)
    assert "parallel.offload" not in advice(run_config(), full)  # on a CPU it saves nothing
    on_gpu = dataclasses.replace(full, device=dataclasses.replace(full.device, value="cuda"))
    assert "parallel.offload: optimizer" in advice(run_config(), on_gpu)
    offloaded = dataclasses.replace(on_gpu, parallel=dataclasses.replace(full.parallel, offload="optimizer"))
    assert "parallel.offload" not in advice(run_config(), offloaded)
    smallest = run_plan(trainable=1, parameters=1, gradient_checkpointing=True)
    smallest = dataclasses.replace(smallest, batch=dataclasses.replace(smallest.batch, micro=smallest.batch.size))
    smallest = dataclasses.replace(
        smallest, batch=dataclasses.replace(smallest.batch, micro=dataclasses.replace(smallest.batch.micro, value=1))
    )
    assert "--resume" not in advice(run_config(), smallest)
    assert "data.max_length" in advice(run_config(), smallest)


@pytest.fixture
def config(tmp_path):
    write_sky(tmp_path, 8)
    return run_config(
        model=str(tiny_llama(tmp_path / "base")),
        data={"train": str(tmp_path / "rows.json")},
        duration="4 steps",
        checkpoint={"every": "1 step"},
        batch={"size": 4},
        output=str(tmp_path / "run"),
    )


def test_a_run_that_runs_out_in_a_step_can_go_on(config, monkeypatch, tmp_path):
    step, calls = steps.run_loop, []

    def train(job, state, observer, stop):
        objective = job.objective

        def hungry(model, batch):
            calls.append(1)
            if len(calls) == 3:
                torch.empty(HUGE)
            return objective(model, batch)

        return step(dataclasses.replace(job, objective=hungry), state, observer, stop)

    monkeypatch.setattr(steps, "run_loop", train)
    with raises_fault("SF-MEMORY", "training"):
        stage.train_run(config, "new", Console(io.StringIO()))
    assert (tmp_path / "run" / "checkpoint-2" / "MANIFEST.json").is_file()
    assert not (tmp_path / "run" / "checkpoint-3").exists()
    assert lines_giving((tmp_path / "run" / "run.log").read_text(), "error:", "training:", "memory")
    monkeypatch.undo()
    assert stage.train_run(config, "resume", Console(io.StringIO())) == 0
    assert (tmp_path / "run" / "checkpoint-4").is_dir()


def test_a_run_that_runs_out_in_set_up_leaves_no_folder(config, monkeypatch, tmp_path):
    monkeypatch.setattr(steps, "load_models", lambda *_: torch.empty(HUGE))
    with raises_fault("SF-MEMORY", "set-up"):
        stage.train_run(config, "new", Console(io.StringIO()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"),
    ],
)
def test_a_device_that_fails_is_an_environment_fault(error):
    words = str(error).splitlines()[0].split()
    with raises_fault("SF-DEVICE", "training", "cpu", *words, remedy=["--resume"]) as caught:  # noqa: SIM117
        with device_faults("training", run_config(), plan()):
            raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_what_a_driver_or_a_library_cannot_allocate_is_lack_of_memory(error):
    assert is_out_of_memory(error)
    assert not is_device_error(error)
    with raises_fault("SF-MEMORY", "training", remedy=["batch.micro"]), device_faults("training", run_config(), plan()):
        raise error


def test_memory_that_a_device_lacks_is_told_as_memory():
    with (
        raises_fault("SF-MEMORY", "training", remedy=["batch.micro=2"]),
        device_faults("training", run_config(), plan()),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. HIP error")


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("CUDA error")])
def test_twin_another_error_stays_what_it_is(error):
    with pytest.raises(type(error)) as caught, device_faults("training", run_config(), plan()):
        raise error
    assert caught.value is error
