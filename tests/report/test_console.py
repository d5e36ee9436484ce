"""On a pipe: no escape codes, no carriage returns, each line at once. In run.log: the same words, with a time.

Long values go on below themselves and leave no blanks at line ends.
"""

import io
import os
import pty
import re
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone

import pytest
import rich.console
from rich.table import Table
from rich.text import Text

from helpers.faults import gives
from surefoot.report import console as console_module
from surefoot.report.console import Console, Hanging, as_plain_text, open_console
from surefoot.system import durable
from surefoot.system.messages import clean
from surefoot.system.process import TerminalWishes

CLEARED = "\x1b[2K"  # what stood in the line
NOTHING_WISHED = TerminalWishes(no_color=False, force_color=False, dumb=False)
PROGRAM = """
import sys
from surefoot.system.process import terminal_wishes
from surefoot.report.console import open_console
from surefoot.report.progress import Progress
from surefoot.report.pace import Timing
from surefoot.training.report import StepReport
from rich.text import Text
console = open_console(sys.stdout, terminal_wishes())
console.say("a caution", style="red")
console.show(Text("in colour", "bold green"))
progress = Progress(console, 3)
for step in (1, 2, 3):
    report = StepReport(step, 1.5, 0.5, 1e-4, 10, 20, (1,), "stepped", None, 0.1)
    progress.step(report, Timing(1.0, 2.0, 30.0, 4.0, None))
progress.close()
console.say("the end")
"""


def on_a_pipe(**environment):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, check=True
    ).stdout.decode()


def on_a_terminal(**environment):
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=slave, stdin=slave)
    os.close(slave)
    seen = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    assert process.wait(timeout=30) == 0
    os.close(master)
    return seen.decode().replace("\r\n", "\n")  # the terminal's own line ends


def test_a_pipe_gets_plain_lines():
    out = on_a_pipe(NO_COLOR="", FORCE_COLOR="")
    assert "\r" not in out
    assert "\x1b" not in out
    lines = [line.split(" · ") for line in out.splitlines() if line.startswith("step")]
    assert [line[0] for line in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    for part, value in zip(lines[0][1:], ("1.500", "0.0001", "0.500", 30, "00:02", "ok"), strict=True):
        assert gives(part, value)


@pytest.mark.parametrize("wish", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_gets_plain_lines_on_request(wish):
    out = on_a_terminal(**wish)
    assert "\r" not in out
    assert "\x1b" not in out
    assert "step 3/3" in out


def test_twin_a_terminal_without_wishes_is_redrawn_in_colour():
    out = on_a_terminal(NO_COLOR="")
    assert "\x1b[" in out
    assert "\x1b[1;32m" in out
    assert "step 3/3" not in out
    assert "3/3 · eta 00:02 · ok" in out
    assert out.count("\x1b[?25l") == 1
    assert out.index("\x1b[?25h") < out.index("1/3")  # whoever kills it in a step finds the cursor where it was
    assert out.rstrip().endswith("the end")


def test_colour_on_a_pipe_only_on_request_and_without_cursor_codes():
    out = on_a_pipe(FORCE_COLOR="1", NO_COLOR="", TERM="xterm-256color")
    assert "\x1b[31m" in out
    assert set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", out)) == {"m"}
    assert "\x1b" not in on_a_pipe(FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")


def test_lines_arrive_at_once():
    program = "import sys, time\n" + PROGRAM.partition("progress =")[0] + "time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"a caution\n"
        assert process.poll() is None
        process.kill()


def test_text_is_text_and_long_lines_stay_whole():
    stream = io.StringIO()
    line = "[bold]runs/a[0][/bold] :smile: " + "x" * 500
    Console(stream).say(line)
    assert stream.getvalue() == line + "\n"


def test_what_others_print_cannot_steer_the_terminal():
    assert clean("a\x1b[31mb\x1b[0m\x1b]0;title\x07c\r\nd\re\x08\x1b(B") == "abc\nd\ne" + "B"
    stream = io.StringIO()
    Console(stream).say("10%\r20%\x1b[2K")
    assert stream.getvalue() == "10%\n20%\n"


class AsciiFile(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii")

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode()


def test_a_stream_without_unicode():
    stream = AsciiFile()
    console = open_console(stream, NOTHING_WISHED)
    console.say("loss 1.2 · 3 → 4 …  日")
    table = Table("a")
    table.add_row("b")
    console.show(table)
    first, *rest = stream.text().splitlines()
    assert first == "loss 1.2 | 3 -> 4 ...  ?"
    assert "| b" in "\n".join(rest)
    with pytest.raises(UnicodeEncodeError):  # the twin: the stream as it was
        Console(AsciiFile()).say("·")


def clock(start=datetime(2026, 11, 21, 8, 0, tzinfo=timezone(timedelta(hours=1)))):
    return lambda: start


def test_run_log_has_everything_with_time_and_offset(tmp_path):
    log = tmp_path / "run.log"
    console = Console(io.StringIO(), color=True, now=clock())
    console.say("before there was a folder", style="red")
    console.log_to(log)
    console.show(Text("a table", "bold"))
    console.note("only here")
    console.say("two\nlines")
    stamp = "2026-11-21T08:00:00.000+01:00 "
    words = ["before there was a folder", "a table", "only here", "two", "lines"]
    assert log.read_text() == "".join(f"{stamp}{word}\n" for word in words)


def test_a_second_session_appends_and_ends_a_torn_line(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("first session\nkilled he")
    console = Console(io.StringIO(), now=clock())
    console.log_to(log)
    console.say("second session")
    assert log.read_text() == "first session\nkilled he\n2026-11-21T08:00:00.000+01:00 second session\n"


def test_the_run_outlives_its_reader(tmp_path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom surefoot.report.console import Console\n"
        f"console = Console(sys.stdout)\nconsole.log_to(Path({str(tmp_path / 'run.log')!r}))\n"
        "console.say('one')\nsys.stdin.readline()\nconsole.say('two')\nconsole.say('three')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(timeout=30) == 0
        assert process.stderr.read() == b""
    assert [line.split()[1] for line in (tmp_path / "run.log").read_text().splitlines()] == ["one", "two", "three"]


def test_plain_text_of_a_table_fits_its_width():
    table = Table("key", "value")
    table.add_row("a", "word " * 100)
    assert max(len(line) for line in as_plain_text(table, width=60).splitlines()) <= 60


def test_a_table_in_a_pipe_has_no_blanks_at_the_ends_of_lines(monkeypatch):
    def lines():
        table, stream = Table("choice", "why"), io.StringIO()
        table.box = None
        table.add_row("device", "one that is there")
        table.add_row("batch", "few")
        Console(stream).show(table)
        return stream.getvalue().splitlines()

    assert [line.rstrip() for line in lines()] == lines()
    monkeypatch.setattr(console_module._Screen, "is_terminal", True)  # twin
    assert any(line.endswith(" ") for line in lines())


def test_the_real_clock_has_an_offset(tmp_path):
    console = Console(io.StringIO())
    console.log_to(tmp_path / "run.log")
    console.say("now")
    stamp = datetime.fromisoformat((tmp_path / "run.log").read_text().split()[0])
    assert stamp.utcoffset() is not None
    assert abs(stamp.timestamp() - time.time()) < 3600


def hostile_table() -> Table:
    table = Table("\x9b31mfile", "\x1b]0;title\x07size")
    table.add_row("a\x1b[2Jb", Text("c\x9bKd", "bold"))
    return table


def test_a_table_holds_no_code_of_its_cells(tmp_path):
    screen = io.StringIO()
    console = Console(screen, live=True, color=True, width=40)
    console.log_to(tmp_path / "run.log")
    console.show(hostile_table())
    for code in ("\x9b", "\x1b[2J", "\x1b]", "\x07"):
        assert code not in screen.getvalue()
        assert code not in (tmp_path / "run.log").read_text()
    assert "ab" in screen.getvalue()
    assert "\x1b[1m" in screen.getvalue()  # the console's own colours stay


def test_twin_without_cleaning_the_table_sends_them(monkeypatch):
    monkeypatch.setattr(console_module, "clean", lambda text: text)
    screen = io.StringIO()
    Console(screen, width=40).show(hostile_table())
    assert "\x1b[2J" in screen.getvalue()


def test_a_passing_line_is_shown_in_place_and_leaves_nothing(tmp_path):
    screen = io.StringIO()
    console = Console(screen, live=True, color=True, width=40)
    console.log_to(tmp_path / "run.log")
    with console.passing() as show:
        show("looking at one")
        show("looking at two")
    console.say("the end")
    out = screen.getvalue()
    assert out.index("looking at one") < out.index("looking at two") < out.index("the end")
    assert CLEARED in out[out.index("looking at two") :]
    assert "looking" not in (tmp_path / "run.log").read_text()


def test_a_plain_console_shows_a_passing_line_after_a_long_silence_alone(monkeypatch):
    clock = iter([0.0, 29.0, 31.0, 31.0, 60.0])
    monkeypatch.setattr(console_module, "monotonic", lambda: next(clock))
    screen = io.StringIO()
    with Console(screen).passing() as show:
        for one in ("looking at one", "looking at two", "looking at three"):
            show(one)
    assert screen.getvalue() == "looking at two\n"


def test_a_log_that_a_copy_shares_is_made_its_own(tmp_path):
    (tmp_path / "kept.log").write_text("before\n")
    os.link(tmp_path / "kept.log", tmp_path / "run.log")
    console = Console(io.StringIO())
    console.log_to(tmp_path / "run.log")
    console.say("after")
    assert (tmp_path / "kept.log").read_text() == "before\n"
    assert (tmp_path / "run.log").read_text().startswith("before\n")
    assert "after" in (tmp_path / "run.log").read_text()


def test_twin_a_log_of_two_names_is_written_through_both(tmp_path):
    (tmp_path / "kept.log").write_text("before\n")
    os.link(tmp_path / "kept.log", tmp_path / "run.log")
    durable.append_lines(tmp_path / "run.log", "after")
    assert (tmp_path / "kept.log").read_text() == "before\nafter\n"


def printed(text: str, width: int) -> list[str]:
    out = io.StringIO()
    rich.console.Console(file=out, width=width).print(Hanging(Text("  name  "), Text(text)))
    return out.getvalue().splitlines()


def test_a_full_line_goes_on_below_the_text():
    assert printed("one two three four five six seven", 30) == ["  name  one two three four", "        five six seven"]


def test_short_texts_and_line_ends_of_their_own():
    assert printed("one", 30) == ["  name  one"]
    assert printed("one\n\ntwo \n", 30) == ["  name  one", "", "        two", ""]


@pytest.mark.parametrize("width", [28, 45, 200])
def test_no_word_is_lost_and_no_line_ends_with_blanks(width):
    words = "a longer text of several words and one_word_that_is_longer_than_any_line_can_be " * 3
    lines = printed(words, width)
    assert "".join("".join(lines).split()) == "name" + "".join(words.split())
    assert all(line == line.rstrip() for line in lines)
