"""Kernels are measured in this process: a child takes longer than the run. `test_kernel_packages` starts children."""

import pytest

from surefoot.planning.probes import child


@pytest.fixture(autouse=True)
def _measured_here(request, monkeypatch):
    if request.path.name != "test_kernel_packages.py":
        monkeypatch.setattr(child, "run_in_child", child.run_request)
