"""README.md and docs/*.md quote what surefoot accepts: configs load, commands parse and run, links lead somewhere."""

import json
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from helpers.doc_pages import (
    CONFIGURATION,
    PAGES,
    README,
    ROOT,
    SITE,
    Quote,
    anchors,
    blocks,
    commands,
    links,
    mentions,
)
from helpers.fork_server import ForkServer
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import COMMANDS, main
from surefoot.commands.quickstart.world import write_data
from surefoot.config.load import load_config
from surefoot.system.errors import InputError

ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 9)]
REQUIRED = {"stage": "sft", "model": "models/base", "data": {"train": "data/alpaca.json"}, "output": "runs/new"}
# Data that configs name and no command of the pages reads.
ELSEWHERE = (
    "train.csv",
    "train.json",
    "quiz.csv",
    "quiz.parquet",
    "texts.jsonl",
    "tools.jsonl",
    "identity.json",
    "sharegpt.json",
)
WRONG = ("train", "trian my-run.yaml", "plan my-run.yaml --fast", "data my-run.yaml lr=1")
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".gz", ".jinja")
LARGEST_PICTURE = 150_000  # bytes: a readme loads at once
NOT_RUN = {
    "quickstart": "tests/commands/quickstart runs it",
    "python train.py": "needs a script; tests/interop/takeover/test_script_runs.py",
    "surefoot teach": "needs a teacher; tests/methods/distill/test_stored.py runs it",
    "chat": "reads what is typed; tests/commands/test_generate.py",
    "board": "serves until it is stopped; tests/web",
    "--against": "needs an earlier capture; tests/commands/test_capture.py",
    "push": "sends to a hub; tests/commands/test_push.py",
    "evaluate commonsense": "needs the eight sets; tests/commands/test_evaluate_tasks.py",
    "evaluate answers": "needs rewards; tests/evaluate/test_answers.py runs it",
    "evaluate reward": "needs a reward model; tests/docs/test_reward_page.py runs them",
    "evaluate harness": "needs the extra eval; tests/evaluate/harness/test_harness.py",
    "recipes/": "tests/recipes",
    "surefoot tune": "many trials; tests/commands/tune/test_command.py runs it",
    "--image": "needs a model that sees; tests/commands/test_generate_pictures.py",
    "replay": "needs a run that went wrong; tests/docs/test_failures_page.py runs them",
}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working folder that has what the pages name: data, a model, configs."""
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def furnish(folder: Path) -> None:
    runs = ("runs/my-run/checkpoint-200", "runs/other-run", "runs/profiled")
    captures = ("captures/base", "captures/tuned")
    failures = ("runs/my-run/failure-12", "runs/broken/failure-2")
    for name in ("data", "models/base", "runs/reward", *runs, *captures, *failures):
        (folder / name).mkdir(parents=True)
    (folder / "models" / "base" / "config.json").write_text("{}")
    (folder / "data" / "alpaca.json").write_text(json.dumps(ROWS))
    (folder / "sampled").mkdir()
    for name in ("data/train.jsonl", "sampled/best.jsonl"):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    for name in ELSEWHERE:
        (folder / "data" / name).touch()
    (folder / "prompts.txt").write_text("Name a bird.\n")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    for name, place in (("lora_sft.yaml", "examples"), ("dataset_info.json", "data")):
        (folder / place).mkdir(exist_ok=True)
        shutil.copy(ROOT / "examples" / name, folder / place)
    adapter = {"kind": "lora", "rank": 4}
    for name in ("my-run.yaml", "run.yaml", "runs/my-run/config.yaml"):
        (folder / name).write_text(yaml.safe_dump(REQUIRED | {"adapter": adapter}))


def load(block: str):
    """A whole config as it is, a fragment with the required keys that it leaves out."""
    given = yaml.safe_load(block)
    missing = {key: value for key, value in REQUIRED.items() if key not in given}
    for name in named_files(given):  # what they hold is not looked at here
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    if (model := given.get("model")) and str(model).startswith(("models/", "runs/")):
        Path(model).mkdir(parents=True, exist_ok=True)
        (Path(model) / "config.json").write_text("{}")
    Path("quoted.yaml").write_text(block + (yaml.safe_dump(missing) if missing else ""), encoding="utf-8")
    return load_config("quoted.yaml")


def named_files(given) -> list[str]:
    """Paths of data files anywhere in a block."""
    if isinstance(given, dict | list):
        parts = given.values() if isinstance(given, dict) else given
        return [name for part in parts for name in named_files(part)]
    return [given] if isinstance(given, str) and Path(given).suffix in SUFFIXES and given.startswith("data/") else []


def parse(words: list[str]) -> None:
    """Raises what the command line would: a wrong flag, a missing argument, a fault of the config."""
    _, name, *arguments = words
    with click.Context(main, **main.context_settings) as context:
        if name.startswith("-"):
            assert name in {option for parameter in main.params for option in parameter.opts}
            return
        command = main.get_command(context, name)
        assert command is not None, f"no command {name}"
        parsed = command.make_context(name, arguments, parent=context).params
    if parsed.get("config"):  # doctor does without one
        load_config(parsed["config"], parsed.get("overrides", ()))


def noticed(check: Callable[..., Any], quotes: Iterable[Quote]) -> dict[str, str]:
    """Each quote at which `check` raises, and what."""
    found = {}
    for quote in quotes:
        try:
            check(quote)
        except (Exception, click.ClickException) as error:
            found[str(quote)] = f"{type(error).__name__}: {error}"
    return found


def test_every_quoted_config_loads(workplace):
    quotes = blocks("yaml")
    assert len(quotes) > 20
    assert noticed(lambda block: load(block.text), quotes) == {}


def test_twin_a_misspelt_key_in_a_page_would_be_noticed(workplace):
    with pytest.raises(InputError, match=r"optim\.lrate: unknown key"):
        load("optim: {lrate: 1e-4}\n")


def test_every_quoted_command_parses(workplace):
    assert noticed(lambda command: parse(command.words), commands()) == {}


def test_twin_a_wrong_command_or_link_in_a_page_would_be_noticed(workplace):
    wrong = [Quote(README, f"surefoot {words}") for words in WRONG]
    assert len(noticed(lambda command: parse(command.words), wrong)) == len(WRONG)
    assert len(noticed(check_mention, [Quote(README, "surefoot trian"), Quote(README, "surefoot plan --fast")])) == 2
    assert len(noticed(check_link, [Quote(README, "docs/none.md"), Quote(README, "docs/ppo.md#none")])) == 2


def check_mention(mention: Quote) -> None:
    """That a command named in the text exists, with its flags."""
    _, name, *rest = mention.words
    if name.startswith("-"):
        parse(mention.words)
        return
    assert name in COMMANDS
    command = main.get_command(click.Context(main, **main.context_settings), name)
    flags = {flag for parameter in command.params for flag in parameter.opts}
    ours = rest[: rest.index("--")] if "--" in rest else rest  # behind it stands another tool's command
    assert {word for word in ours if word.startswith("--")} <= flags


def test_every_command_named_in_the_text_exists_with_its_flags():
    assert noticed(check_mention, mentions()) == {}


def missing_of_the_repository(commands) -> list[str]:
    """Words of commands that name a file in a folder of the repository, which has no such file."""
    folders = ("examples/", "recipes/", "tools/", "compat/", "benchmarks/", "src/")
    return [word for one in commands for word in one.words if word.startswith(folders) and not (ROOT / word).exists()]


def test_what_the_readme_names_in_a_folder_of_the_repository_is_there():
    ours = [command for command in commands() if command.page == README]
    assert any("examples/" in command.text for command in ours)
    assert missing_of_the_repository(ours) == []


def test_twin_a_file_that_the_repository_lacks_would_be_noticed():
    assert missing_of_the_repository([Quote(README, "surefoot translate examples/none.yaml")]) == ["examples/none.yaml"]


def offline_lines() -> str:
    """What the readme says fetches a model and data without a network."""
    (found,) = [one.text for one in blocks("bash") if one.page == README and one.text.startswith("mkdir -p models")]
    return found


def load_offline(folder: Path, lines: str):
    """In a checkout after the quickstart: the lines, then the readme's config on what it fetched. The sources are
    linked, the data are written as the quickstart does."""
    for name in ("src", "examples"):
        (folder / name).symlink_to(ROOT / name)
    write_data(folder / "runs" / "quickstart-data", 42)
    subprocess.run(["sh", "-c", lines], cwd=folder, capture_output=True)
    first = next(block for block in blocks("yaml") if block.page == README)
    (folder / "my-run.yaml").write_text(first.text, encoding="utf-8")
    return load_config("my-run.yaml", ["model=models/base"]).config


def test_the_readmes_model_and_data_can_be_had_offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_offline(tmp_path, offline_lines())
    assert (tmp_path / config.model.path / "model.safetensors").is_file()


@pytest.mark.parametrize(("word", "fault"), [("quickstart/base", "model.path"), ("train-42", "data.train")])
def test_twin_a_place_that_is_gone_would_be_noticed(tmp_path, monkeypatch, word, fault):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=fault):
        load_offline(tmp_path, offline_lines().replace(word, "elsewhere"))


def trained_twice(commands) -> list[str]:
    """Commands that begin a run in a folder in which one before has begun another."""
    begun, twice = set(), []
    for one in commands:
        if one.words[1] == "train" and not {"--resume", "--overwrite", "--dry-run"} & set(one.words):
            output = next((word for word in one.words if word.startswith("output=")), "the config's")
            twice += [one.text] if output in begun else []
            begun.add(output)
    return twice


def test_the_readmes_commands_run_one_behind_the_other():
    assert trained_twice([one for one in commands() if one.page == README]) == []


def test_twin_a_second_run_in_the_same_folder_would_be_noticed():
    typed = ["surefoot train my-run.yaml", "surefoot train my-run.yaml --profile 5"]
    assert trained_twice([Quote(README, line) for line in typed]) == typed[1:]


def test_every_command_is_shown_somewhere():
    assert {command.words[1] for command in commands()} >= set(COMMANDS) - {"explain", "schema"}
    assert {mention.words[1] for mention in mentions()} >= {"explain", "schema"}


def check_link(link: Quote) -> None:
    path, _, anchor = link.text.partition("#")
    target = (link.page.parent / path).resolve() if path else link.page
    assert target.exists()
    if anchor:
        assert anchor in anchors(target)


def test_every_link_leads_somewhere():
    assert noticed(check_link, links()) == {}


# Commands that are run, each in a fresh copy of a working folder with a finished run


@pytest.fixture(scope="module")
def finished(server, tmp_path_factory):
    """A working folder with a tiny model and two equal runs of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    furnish(folder)
    shutil.rmtree(folder / "runs")
    shutil.copytree(tiny_llama(folder / "models" / "base"), folder / "models" / "other")
    config = REQUIRED | {"adapter": {"kind": "lora", "rank": 2}, "duration": "2 steps", "output": "runs/my-run"}
    (folder / "my-run.yaml").write_text(yaml.safe_dump(config))
    for name in ("my-run", "other-run"):
        code, log = run(server, folder, ["train", "my-run.yaml", f"output=runs/{name}"])
        assert code == 0, log
    shutil.copytree(folder / "runs" / "other-run", folder / "runs" / "profiled")
    return folder


def run(server: ForkServer, folder: Path, arguments: list[str]) -> tuple[int, str]:
    log = folder / "log.txt"
    code = server.run(arguments, log, folder=folder)
    return code, log.read_text(encoding="utf-8")


def is_run(command: Quote) -> bool:
    return command.page in PAGES and not any(word in command.text for word in NOT_RUN)


RUN = [command for command in commands() if is_run(command)]
FIRST = {command.words[1]: command for command in reversed(RUN)}.values()  # of each verb


@pytest.mark.parametrize("command", representatives(RUN, *FIRST), ids=str)
def test_a_quoted_command_runs(server, finished, tmp_path, command):
    folder = tmp_path / "work"
    shutil.copytree(finished, folder)
    words = [word.replace("checkpoint-200", "checkpoint-2") for word in command.words[1:]]
    if words[0] == "train" and not {"--resume", "--overwrite"} & set(words):
        shutil.rmtree(folder / "runs")
    code, log = run(server, folder, words)
    assert code == 0, log
    assert "Traceback" not in log


def test_the_first_config_of_the_readme_is_whole():
    first = next(block for block in blocks("yaml") if block.page == README)
    assert set(REQUIRED) <= set(yaml.safe_load(first.text))
    assert any(block.page == CONFIGURATION for block in blocks("yaml"))


def test_the_site_has_every_page():
    def pages(entries):
        for entry in entries:
            target = next(iter(entry.values())) if isinstance(entry, dict) else entry
            yield from pages(target) if isinstance(target, list) else [target]

    listed = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in SITE)


def first_screen(text: str) -> list[str]:
    """What the first 60 lines of a readme show, in order: the path of a picture, and the languages of its blocks."""
    shown = r'^<img src="([^"]+)"|^```(bash|yaml)$'
    return [
        path or language for path, language in re.findall(shown, "\n".join(text.splitlines()[:60]), flags=re.MULTILINE)
    ]


def test_the_first_screen_of_the_readme_is_a_picture_how_to_try_and_how_to_train():
    picture, *shown = first_screen(README.read_text(encoding="utf-8"))
    assert shown[:3] == ["bash", "yaml", "bash"]
    content = (ROOT / picture).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < LARGEST_PICTURE


def test_twin_a_readme_that_begins_with_text_or_without_a_picture_is_noticed():
    text = README.read_text(encoding="utf-8")
    assert first_screen("\n" * 60 + text) == []
    assert first_screen(text.replace("<img", "<!--"))[0] == "bash"


def dotted_names(text: str) -> list[str]:
    """Names such as `surefoot.training.step`, but for files (`surefoot.schema.json`)."""
    return re.findall(r"`(surefoot(?:\.\w+)+)(?:\([^`]*\))?`", re.sub(r"`surefoot\.[\w.]+\.json`", "", text))


def test_every_name_of_the_package_in_a_page_can_be_imported():
    for name in sorted({name for page in PAGES for name in dotted_names(page.read_text("utf-8"))}):
        pkgutil.resolve_name(name)


def test_twin_a_name_that_has_moved_would_be_noticed():
    (name,) = dotted_names("call `surefoot.stages.run(config)`")
    with pytest.raises((ImportError, AttributeError)):
        pkgutil.resolve_name(name)


def missing_files(text: str, folders: str) -> list[str]:
    """Files and folders below `folders` (an alternation) that a text names, and that are not there."""
    named = re.findall(rf"(?<![\w/.])((?:{folders})/[\w./-]*\w)", text)
    return [name for name in named if not (ROOT / name).exists()]


def test_every_page_that_the_program_names_exists():
    code = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    assert any("docs/" in text for text in code)
    assert [name for text in code for name in missing_files(text, "docs")] == []


def test_every_file_of_the_repository_that_a_page_names_exists():
    dated = ROOT / "docs" / "log.md"  # says what was there then
    folders = "tests|benchmarks|recipes|src/surefoot"
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES if page != dated}
    assert {page.name: names for page, text in texts.items() if (names := missing_files(text, folders))} == {}


def test_twin_a_file_that_is_gone_would_be_noticed():
    assert missing_files("see docs/rollouts.md for it, and docs/ppo.md", "docs") == ["docs/rollouts.md"]
    assert missing_files("`tests/stages/test_push.py`, `tests/tools`", "tests|docs") == ["tests/stages/test_push.py"]


def test_every_test_that_the_evidence_names_exists():
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "evidence" / "reliability.md").read_text(encoding="utf-8"))
    written = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in written] == []
