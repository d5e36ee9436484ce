"""Training, resuming and exporting unpickle nothing and speak to nobody: Python itself tells of every attempt.

In a process of its own, because an audit hook stays until the process ends.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from faults.place import Place

PROGRAM = """\
import json, pickle, socket, sys

seen = []

def hook(event, arguments):
    if event == "pickle.find_class":
        seen.append(["pickle", f"{arguments[0]}.{arguments[1]}"])
    elif event in ("socket.connect", "socket.sendto"):
        address = arguments[1]
        inside = not isinstance(address, tuple) or str(address[0]) in ("127.0.0.1", "::1", "localhost")
        if not inside:
            seen.append(["socket", str(address[0])])
    elif event == "socket.getaddrinfo" and arguments[0] not in (None, "localhost", "127.0.0.1", socket.gethostname()):
        seen.append(["name", str(arguments[0])])

sys.addaudithook(hook)
from surefoot.commands.main import main

codes, before_twin = [], None
for words in json.loads(sys.argv[1]):
    if words == ["twin"]:
        before_twin = list(seen)
        pickle.loads(pickle.dumps(socket.AF_INET))
        with socket.socket() as one:
            one.setblocking(False)
            try:
                one.connect(("192.0.2.1", 9))
            except OSError:
                pass
        continue
    try:
        main(words)
    except SystemExit as left:
        codes.append(left.code)
print("\\n" + json.dumps({"codes": codes, "seen": before_twin, "twin": seen}))
"""


def heard(python: str, folder: Path, *commands: list[str]) -> dict[str, Any]:
    result = subprocess.run(
        [python, "-c", PROGRAM, json.dumps(commands)], capture_output=True, text=True, cwd=folder, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_no_pickle_is_opened_and_nobody_is_asked(place: Place, any_python: str) -> None:
    config, out = place.config(), place.folder / "out"
    train = ["train", config, "duration=2 steps"]
    resume = ["train", config, "--resume", "duration=4 steps"]
    export = ["export", str(out), "--merge", "--out", str(place.folder / "whole")]
    found = heard(any_python, place.folder, train, resume, export, ["twin"])
    assert (found["codes"], found["seen"]) == ([0, 0, 0], [])
    assert {kind for kind, _ in found["twin"]} == {"pickle", "socket"}  # a class and a connection are heard
