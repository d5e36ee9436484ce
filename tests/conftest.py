"""Settings for all tests.

One thread per process, set before torch is imported and inherited by child processes: two workers with two threads
each would fight over two cores and spin while they wait.
"""

import gc
import os
import signal
import sys
from contextlib import nullcontext

# A shell that starts the suite in the background has it ignore Ctrl-C, and its children with it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
# Until tests are collected: their files are compiled once and kept, as rewriting all assertions takes longer than the
# rest of collecting them; and there is no garbage yet, looking for which would take a quarter of that.
_WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False
gc.disable()

import psutil
import pytest
from hypothesis import settings

from helpers.blank_pictures import blank_pictures
from helpers.fork_server import ForkServer
from helpers.no_fsync import unflushed
from helpers.python_on_path import served_python
from helpers.tiers import representatives
from helpers.torchvision_operators import declare_operators
from helpers.unlaid_tables import unlaid_tables


def pytest_collection_modifyitems(items):
    """Pages in a browser take seconds and would be the last files: one worker would wait for the other."""
    items.sort(key=lambda item: item.path.parent.name != "web")


def pytest_collection_finish():
    gc.freeze()  # before a plugin's loop over all tests, in which the collector would walk through them
    gc.enable()
    sys.dont_write_bytecode = _WRITES_NO_BYTECODE


declare_operators()
# No deadlines: a shared machine can be slow for a moment. derandomize: a failure here is a failure everywhere.
settings.register_profile("surefoot", deadline=None, derandomize=True)
settings.load_profile("surefoot")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory):
    """Tokenized data goes to a folder of this session, also from child processes."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk():
    with unflushed():
        yield


@pytest.fixture(scope="session", autouse=True)
def _tables_of_run_log_are_not_laid_out():
    with unlaid_tables():
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_is_loaded_stays():
    """Libraries and what earlier tests left are never garbage: walking through torch's objects again and again would
    take the collector a third of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _blank_pictures(request):
    """The curves of runs are not drawn, which takes a quarter of a tiny run's time, except where a module is marked
    `pictures`. Children of the fork server do the same."""
    with nullcontext() if request.node.get_closest_marker("pictures") else blank_pictures():
        yield


@pytest.fixture(scope="session")
def server():
    """Runs commands in forks of a process that has everything loaded."""
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A `python` whose calls are forks of a process that has torch and surefoot loaded, and an environment with it."""
    with served_python(tmp_path_factory.mktemp("served") / "bin") as served:
        yield served


@pytest.fixture(scope="session")
def forked_python(served):
    """The path of that `python`."""
    return str(served.program)


@pytest.fixture(params=representatives(["forked", "typed"], "forked"))
def any_python(request):
    """That one, and in the long tier Python itself, which imports all that anew."""
    return request.getfixturevalue("forked_python") if request.param == "forked" else sys.executable


def _processor_seconds():
    """Of this process and all that it started, those that have ended included."""
    this = psutil.Process()
    return sum(sum(one.cpu_times()[:4]) for one in [this, *this.children(recursive=True)] if one.is_running())


@pytest.fixture(scope="module", autouse=True)
def _what_this_file_costs(request):
    """With TEST_SECONDS=FILE in the environment: processor seconds of each file of tests, a line each."""
    if not (path := os.environ.get("TEST_SECONDS")):
        return (yield)
    before = _processor_seconds()
    yield
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a", encoding="utf-8") as out:
        out.write(f"{_processor_seconds() - before:7.1f} {request.path.relative_to(request.config.rootpath)}\n")
