"""Whatever comes, it is read, or refused as a fault: configs, data, templates, weights, states and other tools' words.

Short by default, with the same inputs each time; `soak` makes millions with fresh seeds:

    make soak SOAK="-k reads_or_refuses --trials inputs=1000000"     # for each reader
"""

import itertools
import os
import tempfile
import threading
from pathlib import Path
from random import Random

import pytest

from faults import fuzz as fuzzing
from faults import parsers, readers
from faults.fuzz import fuzz
from faults.parser_inputs import LEADS_BACK
from faults.parsers import PARSERS, Parser, TooLong, read_or_refuse
from faults.trials import fresh_seed
from helpers.faults import gives, raises_fault
from helpers.tiers import representatives
from surefoot.families.model_facts import read_model_facts
from surefoot.system.errors import InputError

SHORT, LONG = 40, 100  # changed inputs of one reader: `make test`, `make test-long`


@pytest.mark.parametrize("name", PARSERS)
def test_what_was_found_is_mended(name: str) -> None:
    for value in PARSERS[name].known:
        read_or_refuse(PARSERS[name].read, value)


def test_what_was_found_is_told_by_code_and_place() -> None:
    folder = readers.folder()
    found = [
        ("values of configs", 3, "SF-CONFIG-KEY", ["adapter.a.b"]),
        ("values of configs", 4, "SF-CONFIG-KEY", ["1"]),
        ("values of configs", 5, "SF-CONFIG-VALUE", ["data.train[0].epochs", "data.train[1].epochs"]),
        ("cards of data sets", 1, "SF-DATA-HUB", ["org/data/README.md"]),
        ("headers of weights", 2, "SF-MODEL-WEIGHTS", [f"{folder}/model.safetensors"]),
        ("headers of weights", 3, "SF-MODEL-WEIGHTS", [f"{folder}/model.safetensors"]),
        ("manifests", 2, "SF-CHECKPOINT-DAMAGED", [f"{folder}/MANIFEST.json"]),
        ("files of other tools", -1, "SF-TRANSLATE-SETTING", ["", "a.yaml:2:1", "a.yaml:2:1"]),
    ]
    for name, number, code, (first, *others) in found:
        with raises_fault(code, first, also=[(code, where) for where in others]):
            PARSERS[name].read(PARSERS[name].known[number])


@pytest.mark.parametrize(("number", "value"), [(2, "10,000"), (3, "float32")])
def test_what_was_found_in_models_is_told_in_a_line(number: int, value: str, tmp_path: Path) -> None:
    name, content = PARSERS["files of models"].known[number]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_model_facts(tmp_path)
    assert any(gives(fault.what, value) for fault in caught.value.faults)
    assert {fault.where.partition(":")[0] for fault in caught.value.faults} == {str(tmp_path / name)}


def test_a_script_whose_data_lead_back_to_themselves_is_told_so() -> None:
    with pytest.raises(InputError) as caught:
        PARSERS["scripts"].read(LEADS_BACK)
    assert {fault.code for fault in caught.value.faults} == {"SF-TRANSLATE-SCRIPT"}


@pytest.mark.parametrize("count", representatives([SHORT, LONG], SHORT))
@pytest.mark.parametrize("name", PARSERS)
def test_reads_or_refuses(name: str, count: int) -> None:
    assert fuzz(name, PARSERS[name], count, 0).wrong == {}


@pytest.mark.soak("inputs")
@pytest.mark.parametrize("name", PARSERS)
def test_reads_or_refuses_millions(name: str, trials: int) -> None:
    first = fresh_seed()
    found = fuzz(name, PARSERS[name], trials, first)
    print(
        f"{name}: {found.inputs} inputs, {found.read} read, the others refused, {len(found.wrong)} wrong, "
        f"seeds from {first}, {found.seconds / 60:.2f} minutes of the processor"
    )
    assert found.wrong == {}


@pytest.mark.parametrize("name", PARSERS)
def test_a_seed_makes_its_input_again(name: str) -> None:
    made = [[repr(PARSERS[name].changed(Random(number))) for number in range(20)] for _ in range(2)]
    assert made[0] == made[1]
    assert len(set(made[0])) > 10


def test_twins_an_error_that_is_no_fault_and_a_hang_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "SECONDS", 0.05)

    def unforeseen(value: object) -> None:
        raise KeyError("unforeseen")

    def endless(value: object) -> None:
        while True:
            pass

    def endless_and_catching(value: object) -> None:
        try:
            endless(value)
        except Exception:
            raise InputError("something was caught") from None

    for read, expected in ((unforeseen, KeyError), (endless, TooLong), (endless_and_catching, TooLong)):
        parser = Parser(read, lambda draw: 1)
        (what,) = fuzz("a reader", parser, 3, 7).wrong.values()
        assert what.startswith(f"seed 7: {expected.__name__} at ")


def test_twin_a_reader_that_waits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "WALL", 0.05)
    release = threading.Event()
    with pytest.raises(TooLong):
        read_or_refuse(lambda value: release.wait(60), 1)


def test_every_kind_of_failure_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "CHUNK", 10)

    def read(value: int) -> None:
        if value:
            raise KeyError(value)

    found = fuzz("a reader", Parser(read, lambda draw: draw.randrange(3)), 40, 1)
    assert found.inputs == 40
    assert len(found.wrong) == 1


def test_a_hang_in_c_ends_the_process_and_is_named(tmp_path: Path) -> None:
    """Neither signal gets through to it."""
    child = os.fork()
    if not child:
        fuzzing.LAST, tempfile.tempdir = 0.5, str(tmp_path)
        fuzz("a reader", Parser(lambda value: sum(itertools.repeat(0)), lambda draw: 1), 10, 4711)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    (told,) = tmp_path.glob("hangs-a-reader-*")
    assert told.read_text().startswith("a reader: hangs at one of the seeds 4711 to ")
