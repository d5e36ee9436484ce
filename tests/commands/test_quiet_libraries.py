"""What libraries write as they are imported must not end up between the lines of a command."""

import importlib.util
import subprocess
import sys

import pytest

LOADS = "import surefoot; import accelerate; import deepspeed; print('alone')"
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def written(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


@needs_deepspeed
def test_deepspeed_says_nothing_on_stdout():
    assert written(LOADS) == "alone\n"


@pytest.mark.slow
@needs_deepspeed
def test_twin_without_surefoot_it_does():
    assert written(LOADS.removeprefix("import surefoot; ")) != "alone\n"
