"""docs/architecture.md: the rooms as their packages say, no cycle of imports between modules, and each walk in the
order in which a real run goes it."""

import ast
import itertools
import json
import os
import re
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

import surefoot
from helpers.tiny_models import tiny_llama

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE = Path(surefoot.__file__).parent
WALKS = {
    title: re.findall(r"^\d+\. `(surefoot[\w.]+)`", text, re.MULTILINE)
    for title, _, text in (part.partition("\n") for part in PAGE.split("\n## "))
    if re.search(r"^\d+\. `surefoot", text, re.MULTILINE)
}
ROWS = [{"instruction": f"Say sky {n} times.", "output": "sky " * n} for n in range(1, 13)]


def test_the_rooms_are_the_packages_with_their_own_words():
    rooms = dict(re.findall(r"^\| `surefoot\.(\w+)` \| (.+) \|$", PAGE, re.MULTILINE))
    found = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms == {name: (import_module(f"surefoot.{name}").__doc__ or "").splitlines()[0] for name in found}


def test_no_module_lies_loose_beside_the_rooms():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}


def modules_of(source):
    """Name -> file of every module; a package by its own name."""
    named = {".".join(file.relative_to(source.parent).with_suffix("").parts): file for file in source.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in named.items()}


def imported(text, modules):
    """The modules that a source text imports anywhere: in functions and for types as well."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in modules)
        elif isinstance(node, ast.ImportFrom):
            wholes = [f"{node.module}.{one.name}" for one in node.names]
            yield from ({one if one in modules else node.module for one in wholes} & modules.keys())


def on_cycles(graph):
    """Modules on a cycle of imports, or above one: what is left when those without open imports go, over and over."""
    left = {name: targets - {name} for name, targets in graph.items()}
    while done := {name for name, targets in left.items() if not targets}:
        left = {name: targets - done for name, targets in left.items() if name not in done}
    return sorted(left)


def test_no_module_imports_itself_by_way_of_others():
    modules = modules_of(SOURCE)
    texts = {name: file.read_text(encoding="utf-8") for name, file in modules.items()}
    graph = {name: {*imported(text, modules)} for name, text in texts.items()}
    assert on_cycles(graph) == []
    # twins: back from the layer below, for a type alone or within a function
    later = {"if TYPE_CHECKING:\n    from surefoot.runs.run import train_run", "def f():\n    import surefoot.runs.run"}
    for line in later:
        back = {"surefoot.runs.prepare": {*graph["surefoot.runs.prepare"], *imported(line, modules)}}
        assert "surefoot.runs.run" in on_cycles(graph | back)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """Functions of surefoot, by module and name, in the order of their first calls in a LoRA run of two steps."""
    folder, seen = tmp_path_factory.mktemp("walk"), {}
    (folder / "train.json").write_text(json.dumps(ROWS))
    config = {
        "stage": "sft",
        "model": str(tiny_llama(folder / "base")),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": str(folder / "train.json"), "eval": 4},
        "batch": {"size": 4},
        "duration": "2 steps",
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(json.dumps(config))  # JSON is YAML

    def note(frame, event, _):
        if event == "call" and (module := frame.f_globals.get("__name__", "")).startswith("surefoot."):
            seen.setdefault(f"{module}.{frame.f_code.co_qualname}", len(seen))

    with open(os.devnull, "w") as nowhere, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # another test may have prepared the same rows
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            surefoot.train(str(folder / "run.yaml"), stream=nowhere)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return seen


def out_of_order(walk, calls):
    """The names of a walk that were not called, and those called before the one above them."""
    missing = [name for name in walk if name not in calls]
    pairs = itertools.pairwise(walk)
    return missing or [later for earlier, later in pairs if calls[later] < calls[earlier]]


@pytest.mark.parametrize("title", WALKS)
def test_a_run_goes_this_walk(title, calls):
    assert out_of_order(WALKS[title], calls) == []


def test_twin_a_walk_with_two_stations_swapped_is_seen(calls):
    walk = next(iter(WALKS.values()))
    assert out_of_order([walk[1], walk[0], *walk[2:]], calls) == [walk[0]]
    assert out_of_order([*walk, "surefoot.none"], calls) == ["surefoot.none"]


def test_four_walks_of_at_most_a_dozen_files():
    files = {title: {name.rsplit(".", 1)[0] for name in walk} for title, walk in WALKS.items()}
    assert len(files) == 4
    assert {title for title, own in files.items() if len(own) > 12} == set()
