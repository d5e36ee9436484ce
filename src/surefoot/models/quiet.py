"""Suppress progress bars and messages of transformers, PEFT and torch's profiler.

The callers check what these messages would report and raise faults, so nothing is lost.
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
    """Context without progress bars, log lines and Python warnings."""
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
    """Context that discards output to file descriptor 2. torch's profiler writes there from C++ when it starts and
    stops, which no Python setting prevents."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
