"""The functions of torch.cuda for the simulated GPU; they answer like a CUDA build on a machine with one H100."""

import importlib.util
import os
from types import SimpleNamespace

NAME = "Pretend GPU"
CAPABILITY = (9, 0)  # an H100's: bf16, TF32, FlashAttention


def device():
    """Return the extension module, which has the device's counts."""
    import sys

    if "pretend_gpu_device" not in sys.modules:
        path = os.environ["PRETEND_GPU_LIBRARY"]
        spec = importlib.util.spec_from_file_location("pretend_gpu_device", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["pretend_gpu_device"] = module
        if limit := os.environ.get("PRETEND_GPU_BYTES"):
            module.set_limit(int(limit))
    return sys.modules["pretend_gpu_device"]


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.at = None

    def record(self, stream=None):
        import time

        self.at = time.perf_counter()

    def query(self):
        return True

    def wait(self, stream=None):
        pass

    def synchronize(self):
        device().synchronize()

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


class Stream:
    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, device=None, priority=0, **kwargs):
        pass

    def synchronize(self):
        device().synchronize()

    def query(self):
        return True

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def _named(name, function):
    def named(*args, **kwargs):
        return function(*args, **kwargs)

    named.__name__ = named.__qualname__ = name
    return named


def pretend(cuda) -> None:
    """Replace functions of the module torch.cuda."""
    import torch

    stream = Stream()

    def memory(key):
        return lambda *args: device().memory()[key]

    def stats(device_=None):
        held = device().memory()
        return {
            "allocated_bytes.all.current": held["held"],
            "allocated_bytes.all.peak": held["peak"],
            "reserved_bytes.all.current": held["held"],
            "reserved_bytes.all.peak": held["peak"],
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def properties(device_=None):
        return SimpleNamespace(
            name=NAME,
            major=CAPABILITY[0],
            minor=CAPABILITY[1],
            total_memory=device().memory()["limit"],
            multi_processor_count=132,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            shared_memory_per_block_optin=232448,
            L2_cache_size=50 << 20,
            gcnArchName="",
            uuid="pretend",
        )

    clone_here = torch.UntypedStorage.clone

    def clone(storage):  # deepcopy's way; torch makes storages only on devices it was compiled for
        if not storage.is_cuda:
            return clone_here(storage)
        numbers = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (storage.nbytes(),), (1,))
        return numbers.clone().untyped_storage()

    def seed(number):
        device().default_generator().manual_seed(number)

    def constant(value):
        return lambda *args, **kwargs: value

    changes = {
        **dict.fromkeys(
            ("_lazy_init", "init", "set_device", "empty_cache", "ipc_collect", "set_stream"), constant(None)
        ),
        **dict.fromkeys(("_is_compiled", "is_available", "is_initialized", "is_bf16_supported"), constant(True)),
        **dict.fromkeys(("is_current_stream_capturing", "can_device_access_peer"), constant(False)),
        **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device", "utilization"), constant(0)),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), memory("held")),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), memory("peak")),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), seed),
        **dict.fromkeys(("current_stream", "default_stream"), constant(stream)),
        "is_tf32_supported": constant(True),
        "device_count": constant(1),
        "get_device_name": constant(NAME),
        "get_device_capability": constant(CAPABILITY),
        "get_device_properties": properties,
        "get_arch_list": constant(["sm_90"]),
        "mem_get_info": lambda *args: (memory("limit")() - memory("held")(), memory("limit")()),
        "memory_stats": stats,
        "reset_peak_memory_stats": lambda *args: device().reset_peak(),
        "synchronize": lambda *args: device().synchronize(),
        "_sleep": constant(None),
        "clock_rate": constant(1980),
        "stream": lambda one: one or stream,
        "Stream": Stream,
        "Event": Event,
        "seed": lambda: device().default_generator().seed(),
        "initial_seed": lambda: device().default_generator().initial_seed(),
        "get_rng_state": lambda *args: device().default_generator().get_state(),
        "set_rng_state": lambda state, *args: device().default_generator().set_state(state),
        "get_rng_state_all": lambda: [device().default_generator().get_state()],
        "set_rng_state_all": lambda states: device().default_generator().set_state(states[0]),
    }
    # torch.compile looks functions up by identity, so each name has one of its own.
    changes = {name: value if isinstance(value, type) else _named(name, value) for name, value in changes.items()}
    for name, value in changes.items():
        setattr(cuda, name, value)
    torch.UntypedStorage.clone = clone
    torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    for name in ("random", "memory", "streams"):
        module = getattr(cuda, name, None)
        for key, value in changes.items():
            if module is not None and hasattr(module, key):
                setattr(module, key, value)


class Waits:
    """Context manager that records where the host waits for the device.

    seen: number of waits by (why, place, step). place: the nearest surefoot function on the stack, as FILE:FUNCTION;
        None without one (the backward pass runs in its own thread). step: the optimizer step; None outside of steps.
    """

    def __enter__(self):
        import collections

        self.seen = collections.Counter()
        device().set_on_wait(self._note)
        return self

    def __exit__(self, *error):
        device().set_on_wait(None)

    def _note(self, why):
        import sys

        place, step, frame = None, None, sys._getframe(0)
        while frame is not None:
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            if place is None and "/src/surefoot/" in file:
                place = f"{file.rpartition('/src/surefoot/')[2]}:{function}"
            if function == "train_step" and file.endswith("training/step.py"):
                step = frame.f_locals["step"]
            frame = frame.f_back
        self.seen[why, place, step] += 1
