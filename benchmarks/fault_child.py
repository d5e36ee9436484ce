"""Runs the commands of one side of `faults_elsewhere.py`, each in a process of its own, forked after the imports.

    python fault_child.py surefoot | trainer | llamafactory      requests and answers are lines of JSON

What happens to a command stands in its request; all of it is done from outside the trainer's own code:

    {"at": "step", "n": 5, "do": "kill" | "stop"}       SIGKILL or SIGTERM when the optimizer has taken its 5th step
    {"at": "step", "n": 2, "do": "nan"}                 after it, what one decoder layer gives is NaN, once
    {"at": "open", "name": "x.json", "do": "kill"}      SIGKILL before this file of the 4th step's checkpoint is written
    {"at": "mkdir", "do": "fill"}                       when that checkpoint's folder is made, the disk fills up
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = dict[str, Any]
HANGS = -14  # the code of a command that was still going on after its seconds
_SAVED = "checkpoint-4"  # in whose writing a command is disturbed


def surefoot(arguments: list[str]) -> None:
    from surefoot.commands.main import main

    main(arguments)


def trainer(arguments: list[str]) -> None:
    sys.argv = ["fault_trainer.py", *arguments]
    runpy.run_path(str(Path(__file__).with_name("fault_trainer.py")), run_name="__main__")


def llamafactory(arguments: list[str]) -> None:
    from llamafactory.cli import main

    sys.argv = ["llamafactory-cli", *arguments]
    main()


_SIDES: dict[str, tuple[Callable[[list[str]], None], tuple[str, ...]]] = {  # with what is imported before
    "surefoot": (surefoot, ("matplotlib.figure", "surefoot.runs.run")),
    "trainer": (trainer, ("datasets",)),
    "llamafactory": (llamafactory, ("datasets", "llamafactory.train.tuner")),
}


def serve(side: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    run, modules = _SIDES[side]
    for module in ("peft", "transformers.models.llama.modeling_llama", *modules):
        importlib.import_module(module)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        children = [_forked(run, request, request["log"])]
        if request["beside"]:  # the same command again as soon as the first one has its folder
            while not Path(request["beside"]).exists() and os.waitid(os.P_PID, children[0], _LOOK) is None:
                time.sleep(0.01)
            children.append(_forked(run, {**request, "does": None}, f"{request['log']}-beside"))
        print(json.dumps([_code(child) for child in children]), file=answers, flush=True)


_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def _code(child: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return HANGS if code == -signal.SIGALRM else code


def _forked(run: Callable[[list[str]], None], request: Request, log: str) -> int:
    child = os.fork()
    if child:
        return child
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(request["folder"])
    signal.alarm(request["seconds"])
    code = 1
    try:
        if request["does"]:
            _arm(**request["does"])
        run(request["arguments"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _arm(at: str, do: str, n: int = 0, name: str = "") -> None:
    does = {"kill": _die, "stop": _stop, "nan": _poison, "fill": _fill}[do]
    if at == "step":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        taken = 0

        def count(*arguments: Any) -> None:
            nonlocal taken
            taken += 1
            if taken == n:
                does("")

        register_optimizer_step_post_hook(count)
        return

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir") or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.fsdecode(arguments[0])
        if _SAVED not in path:
            return
        writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if (at == "mkdir" and event == "os.mkdir") or (at == "open" and writes and os.path.basename(path) == name):
            does(path)

    sys.addaudithook(heard)


def _die(path: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(path: str) -> None:
    """A little later, from outside the optimizer's step."""
    threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGTERM)).start()


def _poison(path: str) -> None:
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        if type(module).__name__ != "LlamaDecoderLayer" or not module.training:
            return None
        handle.remove()
        return output * torch.nan if isinstance(output, torch.Tensor) else (output[0] * torch.nan, *output[1:])

    handle = register_module_forward_hook(spoil)


_filled = False


def _fill(path: str) -> None:
    """All that is left of the disk under the run's folder."""
    global _filled
    if _filled:
        return
    _filled = True
    file = os.open("filler", os.O_WRONLY | os.O_CREAT)
    try:
        for size in (1 << 16, 1):
            try:
                while True:
                    os.write(file, bytes(size))
            except OSError:
                continue
    finally:
        os.close(file)


if __name__ == "__main__":
    serve(sys.argv[1])
