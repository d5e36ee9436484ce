"""Python runs this at start-up on the simulated GPU, see helpers.pretend_gpu.

The device registers itself before torch is imported, because torch asks only once which devices exist. After torch.cuda
is imported, its functions are replaced.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

LIBRARY = os.environ.get("PRETEND_GPU_LIBRARY")


class _AfterTorchCuda(importlib.abc.MetaPathFinder):
    """An import hook that replaces the functions of torch.cuda after it is loaded."""

    def find_spec(self, name, path, target=None):
        if name != "torch.cuda":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            from pretend_cuda import pretend

            pretend(module)

        spec.loader.exec_module = exec_module
        sys.meta_path.remove(self)
        return spec


def _register() -> None:
    import ctypes
    import importlib.util

    torch = importlib.util.find_spec("torch")
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(os.path.join(os.path.dirname(torch.origin), "lib", library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
    sys.meta_path.insert(0, _AfterTorchCuda())
    kernels = "bitsandbytes.backends.cuda.ops"  # they are compiled for CUDA; pretend_gpu.cpp takes those of the CPU
    sys.modules[kernels] = types.ModuleType(kernels)


if LIBRARY and "torch" not in sys.modules:
    _register()
