"""The server refuses whoever it should, by raw sockets; others get everything at first, then what changed."""

import json
import re
import signal
import socket
import subprocess
import sys

import pytest

from helpers.board_server import serving
from helpers.faults import raises_fault
from helpers.run_folders import log_more, log_rows, train_row, write_run
from surefoot.commands.board import server as module
from surefoot.commands.board.server import Board, follow_all, follow_run


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "runs" / "a", log_rows(20, 30))
    (tmp_path / "runs" / "secret.txt").write_text("secret")
    return tmp_path / "runs"


@pytest.fixture
def board(root):
    with serving(root, beat=0.1) as server:
        yield server


def ask(board, target="/", *, method="GET", key=True, host="", headers=()):
    """Status code and text of the whole answer. host: None sends no Host at all."""
    lines = [f"{method} {target} HTTP/1.1"]
    if host is not None:
        lines.append(f"Host: {host or f'127.0.0.1:{board.server_port}'}")
    if key:
        lines.append(f"Cookie: {board.cookie}={board.token}")
    with socket.create_connection(("127.0.0.1", board.server_port), timeout=5) as connection:
        connection.sendall("\r\n".join([*lines, *headers, "", ""]).encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    text = answer.decode(errors="replace")
    return int(text.split(" ", 2)[1]), text


def run_path(board):
    return re.search(r'href="(/run/[0-9a-f]{12})"', ask(board)[1])[1]


def test_the_printed_address_lets_in(board):
    target = board.address.partition(str(board.server_port))[2]
    code, text = ask(board, target, key=False)
    assert code == 303
    assert f"Set-Cookie: {board.cookie}={board.token}; Path=/; HttpOnly; SameSite=Strict" in text
    assert "Location: /\r\n" in text
    assert ask(board)[0] == 200


@pytest.mark.parametrize("target", ["/", "/?token=", "/?token=wrong", "/?token=%ff%fe", "/events", "/run/000000000000"])
def test_without_the_key_nobody_gets_anything(board, target):
    code, text = ask(board, target, key=False)
    assert code == 403
    assert board.token not in text
    assert ask(board, "/", key=False, headers=[f"Cookie: {board.cookie}=wrong"])[0] == 403
    assert ask(board, "/", key=False, headers=["Cookie: ;;=\x01"])[0] == 403


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_both_names_of_this_machine_are_answered(board, name):
    assert ask(board, host=f"{name}:{board.server_port}")[0] == 200


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
@pytest.mark.parametrize("port", ["", ":9", ":080", ":{}0", ":0{}"])
def test_another_port_of_this_machine_is_refused_with_an_origin_of_that_port_too(board, name, port):
    host = f"{name}{port.format(board.server_port)}"
    assert ask(board, host=host)[0] == 403
    assert ask(board, host=host, headers=[f"Origin: http://{host}"])[0] == 403


def test_twin_that_compares_only_the_name_answers_another_port(board, monkeypatch):
    def by_name(self):
        return self.headers["Host"].partition(":")[0] in module._NAMES

    monkeypatch.setattr(module._Handler, "_is_for_us", by_name)
    assert ask(board, host="localhost:9", headers=["Origin: http://localhost:9"])[0] == 200


FOREIGN = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "127.0.0.1:x", None]


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("target", ["/", "/events"])
def test_a_foreign_host_is_refused(board, host, target):
    assert ask(board, target, host=host)[0] == 403


def test_two_hosts_are_refused(board):
    assert ask(board, headers=["Host: evil.example"])[0] == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "https://127.0.0.1", "null", "http://127.0.0.1:1"])
def test_a_foreign_origin_is_refused(board, origin):
    assert ask(board, headers=[f"Origin: {origin}"])[0] == 403


def test_its_own_origin_is_not(board):
    assert ask(board, headers=[f"Origin: http://127.0.0.1:{board.server_port}"])[0] == 200


def test_twin_without_the_check_of_the_host_it_would_answer(board, monkeypatch):
    monkeypatch.setattr(module._Handler, "_is_for_us", lambda self: True)
    assert ask(board, host="evil.example")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT"])
def test_other_methods_are_refused(board, method):
    code, text = ask(board, method=method)
    assert code == 405
    assert "Allow: GET" in text


PATHS = [
    "/secret.txt",
    "/../secret.txt",
    "/run/../secret.txt",
    "/run/..%2fsecret.txt",
    "/run/a",
    "/run/000000000000",
    "/run/000000000000/events",
    "//etc/passwd",
    "/run/%00",
]


@pytest.mark.parametrize("target", PATHS)
def test_no_path_of_a_request_is_a_path_of_a_file(board, target):
    code, text = ask(board, target)
    assert code == 404
    assert "secret" not in text.partition("\r\n\r\n")[2]


def test_every_answer_says_what_a_browser_may_do(board):
    for target, key in (("/", True), ("/", False), (run_path(board), True), ("/nothing", True)):
        head = ask(board, target, key=key)[1].partition("\r\n\r\n")[0]
        assert "Content-Security-Policy: default-src 'none'" in head
        assert "frame-ancestors 'none'" in head
        for line in ("X-Content-Type-Options: nosniff", "Cache-Control: no-store", "Referrer-Policy: no-referrer"):
            assert line in head


class Listener:
    """A stream of server-sent events, read by hand."""

    def __init__(self, board, target):
        self._connection = socket.create_connection(("127.0.0.1", board.server_port), timeout=5)
        head = (
            f"GET {target} HTTP/1.1\r\nHost: localhost:{board.server_port}\r\nCookie: {board.cookie}={board.token}\r\n"
        )
        self._connection.sendall(f"{head}\r\n".encode())
        self._file = self._connection.makefile("rb")
        while self._file.readline() not in (b"\r\n", b""):
            pass

    def next(self, event):
        """Data of the next event of this name; None for a comment, whose name is ""."""
        found, data = "", None
        for line in self._file:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "event":
                found = value
            elif name == "data":
                data = json.loads(value)
            elif name == "" and value:
                found = ""
            elif name == "":
                if found == event:
                    return data
                data = None
        raise AssertionError("the stream ended")

    def close(self):
        self._file.close()
        self._connection.close()


def test_a_row_arrives(board, root):
    listener = Listener(board, f"{run_path(board)}/events")
    listener.next("curves")
    log_more(root / "a", [train_row(21, 30, 0.5)])
    assert listener.next("curves")["charts"][0]["lines"][0]["x"][-1] == 21
    listener.close()


def test_silence_is_broken_by_a_heartbeat(board):
    listener = Listener(board, "/events")
    listener.next("parts")
    assert listener.next("") is None
    listener.close()


def test_a_port_in_use_is_one_line(board, root):
    with raises_fault("SF-USE-FLAG", f"port {board.server_port}"):
        Board(root, board.server_port)


def test_only_this_machine_can_reach_it(board):
    assert board.server_address[0] == "127.0.0.1"


def start(root, *options):
    command = [sys.executable, "-m", "surefoot", "board", str(root), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_it_cleanly_with_a_page_open(root):
    process = start(root)
    assert process.stdout.readline().startswith("1 run in ")
    port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)\n", process.stdout.readline()).groups()
    connection = socket.create_connection(("127.0.0.1", int(port)), timeout=5)
    head = f"GET /events HTTP/1.1\r\nHost: localhost:{port}\r\nCookie: surefoot_{port}={token}\r\n\r\n"
    connection.sendall(head.encode())
    assert connection.recv(15).startswith(b"HTTP/1.0 200")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=8)
    connection.close()
    assert (process.returncode, errors) == (0, "")


def check_a_board_in_the_background(root, before="", seconds=8):
    """As a shell without job control starts `surefoot board RUNS &`: with SIGINT ignored. It ends within `seconds`."""
    code = f"import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); {before}"
    code += "from surefoot.commands.main import main; main(['board', sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("1 run in ")
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=seconds) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_board_in_the_background_hears_sigint_too(root):
    check_a_board_in_the_background(root)


def test_twin_what_a_shell_set_to_be_ignored_stays_ignored(root):
    with pytest.raises(subprocess.TimeoutExpired):
        check_a_board_in_the_background(root, "signal.default_int_handler = signal.SIG_IGN; ", 0.5)


def test_it_starts_without_the_heavy_libraries():
    code = (
        "import sys, surefoot.commands.board.server; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def until_quiet(stream):
    """The messages up to the next pause."""
    messages = []
    while (message := next(stream)) is not None:
        messages.append(message)
    return messages


def curves(messages):
    (found,) = [message for message in messages if message.event == "curves"]
    return found


def losses(message):
    return next(line["x"] for line in message.data["charts"][0]["lines"] if line["name"] == "training")


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "a", log_rows(300, 900))


def test_first_all_then_what_is_new(run):
    stream = follow_run(run)
    first = until_quiet(stream)
    (parts,) = [message.data for message in first if message.event == "parts"]
    assert set(parts) == {"head", "event-list", "sample-list"}
    assert losses(curves(first)) == list(range(1, 301))
    assert until_quiet(stream) == []
    log_more(run, [train_row(301, 900, 0.7)])
    second = until_quiet(stream)
    assert losses(curves(second)) == list(range(1, 302))
    assert [set(message.data) for message in second if message.event == "parts"] == [{"head"}]


def test_a_log_that_was_cut_is_sent_as_it_is_now(run):
    stream = follow_run(run)
    until_quiet(stream)
    log = run / "trainer_log.jsonl"
    other = run / "other"
    other.write_text("".join(log.read_text().splitlines(keepends=True)[:200]))
    other.replace(log)
    assert losses(curves(until_quiet(stream)))[-1] < 200


def test_the_overview_is_sent_when_a_row_of_it_changes(run):
    stream = follow_all(run.parent)
    (first,) = until_quiet(stream)
    assert "300 / 900" in first.data["runs"]
    assert until_quiet(stream) == []
    log_more(run, [train_row(301, 900, 0.7)])
    (second,) = until_quiet(stream)
    assert "301 / 900" in second.data["runs"]


def test_a_message_is_one_event(run):
    for message in until_quiet(follow_run(run)):
        text = message.encode().decode()
        assert text.endswith("\n\n")
        assert text.count("\n\n") == 1
        data = next(line for line in text.splitlines() if line.startswith("data: "))
        assert json.loads(data.removeprefix("data: ")) == message.data
