"""The command line as a whole: its surface, its exit codes, what it imports, and how it fails. What libraries write as
they are imported must not end up between the lines of a command."""

import importlib.util
import os
import signal
import subprocess
import sys
import types
from importlib import metadata

import click
import pytest
from click.testing import CliRunner, Result

from surefoot.commands.evaluate import MEASUREMENTS, evaluate
from surefoot.commands.main import COMMANDS, main
from surefoot.system import process
from surefoot.system.errors import Diverged, EnvironmentFault, Fault, InputError, IntegrityError

# The surface of the command line. It grows by decision, not by accident: a knob of a run belongs into the config.
SURFACE = {
    "board": "runs --port --open",
    "doctor": "config overrides --json --anew",
    "capture": "model --adapter --out --seq-len --layers --text --data "
    "--template --bos --attention --dtype --against --overwrite",
    "chat": "model --adapter --system --max-new-tokens --temperature --top-p --seed",
    "compat": "folder --overwrite",
    "completion": "shell",
    "compare": "run_a run_b --json --plot",
    "convert": "source --out --to --base --list --dry-run --overwrite",
    "data": "config overrides --json",
    "evaluate": "",
    "explain": "key",
    "export": "model --adapter --out --merge --dtype --max-shard-size --device "
    "--gguf --modelfile --drop-bos-scale --prompts --threshold --overwrite --as",
    "generate": "model --adapter --prompt --file --image --system --raw "
    "--max-new-tokens --temperature --top-p --seed --json",
    "init": "model data overrides --out --stage",
    "tune": "config overrides --out --seconds --json",
    "teach": "config overrides --out --top",
    "migrate": "config overrides --to --out --hardware --try --json",
    "plan": "config overrides --hardware --json --scale",
    "push": "run name --public --base --dry-run",
    "quickstart": "--out --adapter --seed --resume --overwrite",
    "replay": "folder moved --plain --json",
    "run": "words --allow-unknown --resume --overwrite --quiet --dry-run --drop --check",
    "schema": "",
    "train": "config overrides --resume --overwrite --quiet --plan --push --profile --time-every --dry-run --check",
    "translate": "words --out --json --allow-unknown --drop",
    "verify": "folder --same-as --served --name --data --max-samples --threshold --json",
}

MEASUREMENTS_SURFACE = {
    "answers": "model --adapter data --data --config --answers --seed "
    "--max-samples --best --pairs --only --json --out --overwrite",
    "commonsense": "model --adapter data --data --sets --mode --template --batch-size "
    "--max-samples --out --model-label --label --only --overwrite --json",
    "norms": "model --adapter data --data --template --bos --max-samples --generate-samples --json --out --overwrite",
    "harness": "model --adapter tasks --tasks --include-path --num-fewshot --limit "
    "--batch-size --apply-chat-template --only --json --out --overwrite",
    "reward": "model --adapter data --data --template --max-length --max-samples --batch-size --json --out --overwrite",
    "loss": "model --adapter data --data --template --max-length "
    "--max-samples --batch-size --only --json --out --overwrite",
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def surface(command: click.Command | None) -> str:
    assert command is not None
    names = [param.name if isinstance(param, click.Argument) else max(param.opts, key=len) for param in command.params]
    return " ".join(str(name) for name in names if name != "--debug")


def test_the_surface_is_frozen() -> None:
    assert {name: surface(main.get_command(click.Context(main), name)) for name in COMMANDS} == SURFACE
    measured = {name: surface(evaluate.get_command(click.Context(evaluate), name)) for name in MEASUREMENTS}
    assert measured == MEASUREMENTS_SURFACE
    assert surface(main) == "--version --local_rank"


def test_twin_a_new_option_is_noticed() -> None:
    command = click.Command("train", params=[click.Option(["--lr"])])
    assert surface(command) != SURFACE["train"]


def test_help_lists_every_command_once() -> None:
    result = run("--help")
    assert result.exit_code == 0
    lines = result.output.partition("Commands:")[2].splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS] == list(
        COMMANDS
    )
    assert all(entry.help in result.output for entry in COMMANDS.values())


def test_every_command_has_a_help_page() -> None:
    for name in COMMANDS:
        result = run(name, "-h")
        assert (result.exit_code, "--debug" in result.output) == (0, True), name


def test_version_names_what_surefoot_stands_on() -> None:
    lines = run("--version").output.splitlines()
    assert lines[0] == f"surefoot {metadata.version('surefoot')}"
    assert [line.split()[0] for line in lines] == ["surefoot", "torch", "transformers", "peft", "python"]


@pytest.mark.parametrize(
    ("words", "named"),  # what the one line has to name, beside the page of help
    [
        ("trian", "`surefoot train`"),
        ("run.yaml", "`surefoot train run.yaml`"),
        ("zebra", "zebra"),
        ("report runs/a", "`surefoot board`"),
        ("verify / /tmp", "`surefoot verify / --same-as /tmp`"),
        ("explain --debgu", "'--debug'"),
        ("--verison", "'--version'"),
        ("explain a b", "(b)"),
        ("train", "'CONFIG.yaml'"),
    ],
)
def test_wrong_usage_is_one_line(words: str, named: str) -> None:
    result = CliRunner().invoke(main, words.split(), prog_name="surefoot")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ")
    assert named in result.stderr
    page = words.split()[0] if words.split()[0] in {"verify", "explain", "train"} else ""
    assert result.stderr.endswith(f"See `{' '.join(filter(None, ['surefoot', page]))} --help`.\n")


def test_abbreviated_options_are_refused() -> None:
    assert run("--vers").exit_code == 2


def test_without_a_command_the_help_page_is_shown() -> None:
    result = run()
    assert result.exit_code == 2
    assert "Commands:" in result.output


def let_plan_end(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int | None) -> None:
    """`surefoot plan` raises or returns the outcome."""

    def end() -> int | None:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.SimpleNamespace(plan=click.Command("plan", callback=end))
    monkeypatch.setattr("surefoot.commands.main.import_module", lambda _: module)
    monkeypatch.setattr(main, "commands", {})


@pytest.mark.parametrize(
    ("outcome", "code", "stderr"),
    [
        (None, 0, ""),
        (75, 75, ""),
        (InputError(Fault("optim.lr", "wrong", "change")), 2, "error: optim.lr: wrong; change\n"),
        (EnvironmentFault("full"), 3, "error: full\n"),
        (IntegrityError("broken"), 4, "error: broken\n"),
        (Diverged("infinite"), 5, "error: infinite\n"),
        (InputError([Fault("a", "x"), Fault("b", "y")]), 2, "error: a: x\nerror: b: y\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (SystemExit(7), 7, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int | None, code: int, stderr: str
) -> None:
    let_plan_end(monkeypatch, outcome)
    result = CliRunner().invoke(main, ["plan"], prog_name="surefoot")
    assert result.exit_code == code
    assert result.stderr == stderr


@pytest.mark.parametrize(
    ("outcome", "code", "parts"),
    [
        (KeyError("who"), 1, ("KeyError: 'who'", "--debug")),
        (click.UsageError("either"), 2, ("error: either", "`surefoot plan --help`")),
    ],
)
def test_what_is_no_fault_is_one_line_with_the_way_on(
    monkeypatch: pytest.MonkeyPatch, outcome: Exception, code: int, parts: tuple[str, ...]
) -> None:
    let_plan_end(monkeypatch, outcome)
    result = CliRunner().invoke(main, ["plan"], prog_name="surefoot")
    (line,) = result.stderr.splitlines()
    assert result.exit_code == code
    assert all(part in line for part in parts)


@pytest.mark.parametrize(("package", "code"), [("torchvision", 3), ("another", 1)], ids=["ours", "twin"])
def test_a_torchvision_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch, package: str, code: int) -> None:
    """As transformers' lazy imports raise it, for every module."""
    found = ModuleNotFoundError("Could not import module 'PreTrainedModel'.")
    found.__cause__ = RuntimeError(f"operator {package}::nms does not exist")
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    let_plan_end(monkeypatch, found)
    result = run("plan")
    assert result.exit_code == code
    assert ("SF-PACKAGE" in result.stderr) == (code == 3)


@pytest.mark.parametrize("outcome", [InputError("bad"), KeyError("who")])
def test_the_traceback_appears_only_with_debug(monkeypatch: pytest.MonkeyPatch, outcome: Exception) -> None:
    let_plan_end(monkeypatch, outcome)
    assert "Traceback" in run("--debug", "plan").stderr
    assert "Traceback" in run("plan", "--debug").stderr
    assert "Traceback" not in run("plan").stderr


def test_local_rank_of_the_deepspeed_launcher_is_accepted() -> None:
    assert run("--local_rank=3", "explain", "seed").exit_code == 0
    assert "--local_rank" not in run("--help").output


def surefoot(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "surefoot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)  # pyright: ignore


def test_python_minus_m() -> None:
    """Also on a terminal without UTF-8."""
    ascii = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = surefoot("--local_rank=0", "explain", "precision", env=ascii)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("precision\n")
    assert surefoot("trian").returncode == 2


def test_a_reader_that_leaves_is_no_error() -> None:
    program = f"{sys.executable} -m surefoot schema | {sys.executable} -c pass"
    result = subprocess.run(["sh", "-c", program], capture_output=True, text=True)
    assert result.stderr == ""


def test_ctrl_c() -> None:
    program = (
        "import os, signal, click, surefoot.commands.main as m\n"
        "m.main.commands['plan'] = click.Command('plan', callback=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "m.main(['plan'])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 128 + signal.SIGINT
    assert "Traceback" not in result.stderr


def imported_packages(program: str) -> set[str]:
    """Installed packages that a fresh process has imported after `program`."""
    program += """
import sys, sysconfig
roots = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
for name, module in list(sys.modules.items()):
    if "." not in name and (getattr(module, "__file__", None) or "").startswith(roots):
        print("imported", name)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {line.split()[1] for line in result.stdout.splitlines() if line.startswith("imported ")}


def imported_by(*arguments: str) -> set[str]:
    program = f"""
from surefoot.commands.main import main
try:
    main({list(arguments)!r})
except SystemExit:
    pass
"""
    return imported_packages(program) - imported_packages("")


def test_help_imports_click_and_nothing_else() -> None:
    assert imported_by("--help") == {"click"}


def test_explain_imports_only_what_the_config_needs() -> None:
    pydantic = {"pydantic", "pydantic_core", "typing_extensions", "typing_inspection", "annotated_types"}
    assert imported_by("explain") == {"click"} | pydantic


def test_import_surefoot_is_lazy() -> None:
    program = (
        "import sys, surefoot\n"
        "assert not {'torch', 'pydantic', 'yaml', 'click'} & set(sys.modules)\n"
        "assert 'load_config' in dir(surefoot) and surefoot.load_config.__module__ == 'surefoot.config.load'\n"
        "print(surefoot.__version__)\n"
        "assert not hasattr(surefoot, 'zebra')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == metadata.version("surefoot")


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["train", "no.yaml"], True),
        (["--debug", "plan", "no.yaml"], True),
        (["explain", "train"], False),
        (["--version"], False),
    ],
)
def test_the_program_of_a_command_that_plans_begins_again(
    monkeypatch: pytest.MonkeyPatch, words: list[str], again: bool
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(sys, "argv", ["surefoot", *words])
    monkeypatch.setattr(process, "restart_without_thread_cache", lambda: started.append(True))
    with pytest.raises(SystemExit):
        main()
    assert bool(started) == again


def test_twin_a_command_that_is_called_from_a_program_goes_on_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "restart_without_thread_cache", lambda: pytest.fail("began again"))
    assert run("train", "no.yaml").exit_code == 2


LOADS = "import surefoot; import accelerate; import deepspeed; print('alone')"
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def written(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


@needs_deepspeed
def test_deepspeed_says_nothing_on_stdout():
    assert written(LOADS) == "alone\n"


@pytest.mark.slow
@needs_deepspeed
def test_twin_without_surefoot_it_does():
    assert written(LOADS.removeprefix("import surefoot; ")) != "alone\n"
