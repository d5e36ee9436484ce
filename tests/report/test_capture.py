"""Libraries speak through one voice: once on the screen, always in run.log, and afterwards as before."""

import io
import logging
import sys
import warnings

import pytest
from transformers.utils import logging as transformers_logging

from surefoot.report.capture import captured_libraries
from surefoot.report.console import Console


@pytest.fixture
def heard(tmp_path):
    screen = io.StringIO()
    console = Console(screen)
    console.log_to(tmp_path / "run.log")
    return console, screen, tmp_path / "run.log"


@pytest.fixture
def library():
    """A logger that writes to stderr by itself, as transformers' and torch's do."""
    logger = logging.getLogger("some_library")
    logger.handlers, logger.propagate, logger.level = [logging.StreamHandler(sys.stderr)], False, logging.NOTSET
    yield logging.getLogger("some_library.part")
    logger.handlers, logger.propagate, logger.level = [], True, logging.NOTSET


def test_a_log_record_appears_once_on_the_screen_and_each_time_in_the_log(heard, library, capsys):
    console, screen, log = heard
    with captured_libraries(console):
        for _ in range(3):
            library.warning("slow %s\nbut correct", "path")
        library.info("a detail")
    assert screen.getvalue().splitlines() == [
        "some_library: slow path but correct",
        "3 times: some_library: slow path but correct",
    ]
    assert log.read_text().count("slow path") == 4
    assert capsys.readouterr().err == ""


def test_twin_without_capture_it_goes_to_stderr(library, capsys):
    library.parent.handlers[0].setStream(sys.stderr)
    library.warning("slow path")
    assert capsys.readouterr().err == "slow path\n"


def test_python_warnings(heard):
    console, screen, log = heard
    with captured_libraries(console):
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("old name", UserWarning, stacklevel=1)
    assert screen.getvalue().splitlines()[0] == "UserWarning: old name"
    assert log.read_text().count("old name") == 3


def test_transformers(heard, capsys):
    console, screen, _ = heard
    logger = transformers_logging.get_logger("transformers.some_model")
    root = logging.getLogger("transformers")
    before = root.handlers[:], root.propagate
    with captured_libraries(console):
        logger.warning("an \x1b[31malarming\x1b[0m message")
    assert screen.getvalue() == "transformers: an alarming message\n"
    assert (root.handlers, root.propagate) == before
    assert capsys.readouterr().err == ""


def test_who_asked_for_details_gets_them_unchanged(heard, library):
    console, screen, _ = heard
    own = io.StringIO()
    library.parent.setLevel(logging.DEBUG)
    library.parent.handlers[0].setStream(own)
    sys_stderr, sys.stderr = sys.stderr, own
    try:
        with captured_libraries(console):
            library.debug("a detail")
    finally:
        sys.stderr = sys_stderr
    assert own.getvalue() == "a detail\n"
    assert screen.getvalue() == ""


def test_a_long_message_is_cut_on_the_screen_only(heard, library):
    console, screen, log = heard
    with captured_libraries(console):
        library.warning("x" * 5000)
    assert len(screen.getvalue()) < 400
    assert screen.getvalue().endswith("… (all of it in run.log)\n")
    assert "x" * 5000 in log.read_text()


def test_everything_is_put_back_when_the_run_fails(heard, library):
    console, _, _ = heard
    handlers = library.parent.handlers[:]
    root = logging.getLogger().handlers[:]
    with pytest.raises(RuntimeError), captured_libraries(console):
        raise RuntimeError
    assert library.parent.handlers == handlers
    assert library.parent.propagate is False
    assert logging.getLogger().handlers == root
