"""A device that fails: exit 3, one line, no checkpoint of the step; any other error stays what it is."""

import pytest
import torch

from helpers.faults import raises_fault
from helpers.model_layouts import run_config
from helpers.plans import run_plan
from surefoot.runs.faults import device_faults
from surefoot.training.failure import is_device_error, is_out_of_memory

PLAN = run_plan(trainable=1, parameters=1)


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
        with device_faults("training", run_config(), PLAN):
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
    with raises_fault("SF-MEMORY", "training", remedy=["batch.micro"]), device_faults("training", run_config(), PLAN):
        raise error


def test_memory_that_a_device_lacks_is_told_as_memory():
    with (
        raises_fault("SF-MEMORY", "training", remedy=["batch.micro=2"]),
        device_faults("training", run_config(), PLAN),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. HIP error")


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("CUDA error")])
def test_twin_another_error_stays_what_it_is(error):
    with pytest.raises(type(error)) as caught, device_faults("training", run_config(), PLAN):
        raise error
    assert caught.value is error
