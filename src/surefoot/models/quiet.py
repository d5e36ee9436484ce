"""Keep transformers, PEFT and torch's profiler from writing progress bars and reports of their own.

What they would have reported is checked by the caller and raised as a fault, so nothing is lost.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """No progress bars, log lines or Python warnings inside; the former settings afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def muted_stderr() -> Iterator[None]:
    """For torch's profiler: it writes to file descriptor 2 when it starts and stops, from C++; no setting in Python
    stops it."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
