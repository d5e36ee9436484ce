"""Settings for all tests.

One thread per process, set before torch is imported and inherited by child processes: two workers with two threads
each would fight over two cores and spin while they wait.
"""

import os
import signal

# A shell that starts the suite in the background has it ignore Ctrl-C, and its children with it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
from hypothesis import settings

# No deadlines: a shared machine can be slow for a moment. derandomize: a failure here is a failure everywhere.
settings.register_profile("surefoot", deadline=None, derandomize=True)
settings.load_profile("surefoot")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory):
    """Tokenised data goes to a folder of this session, also from child processes."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
