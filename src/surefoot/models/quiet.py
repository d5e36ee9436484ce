"""Keep transformers and PEFT from writing progress bars and reports of their own.

What they would have reported is checked by the caller and raised as a fault, so nothing is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

from surefoot.libraries import import_bitsandbytes, is_installed


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
def quiet_peft() -> Iterator[None]:
    """The same around PEFT's injection, which imports bitsandbytes wherever it is installed, needed or not."""
    if is_installed("bitsandbytes"):
        import_bitsandbytes()
    with quiet_libraries():
        yield
