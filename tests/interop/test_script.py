"""Scripts: literals are read from the syntax tree, nothing runs, and what is not a literal is told with its place."""

from __future__ import annotations

import ast

import pytest

from helpers.faults import gives, raises_fault
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.script.literals import Script, Unread
from surefoot.system.errors import InputError

SCRIPT = """\
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{before}
model = AutoModelForCausalLM.from_pretrained("m"{load})
data = load_dataset("json", data_files="d.json", split="train")
args = TrainingArguments(output_dir="out"{arguments})
Trainer(model=model, args=args, train_dataset={data}{trainer}).train()
"""


def script(before="", load="", arguments="", data="data", trainer=""):
    return SCRIPT.format(before=before, load=load, arguments=arguments, data=data, trainer=trainer)


def translated(text: str):
    return translate_file("train.py", text, [], Options())


def value(expression: str, before: str = ""):
    parsed = Script.parse(f"{before}\nx = {expression}\n", "s.py")
    last = parsed.tree.body[-1]
    assert isinstance(last, ast.Assign)
    return parsed.value(last.value)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("1e-4", 1e-4),
        ("-3", -3),
        ("2 * 8 + 1", 17),
        ("1 / 4", 0.25),
        ("'a' + 'b'", "ab"),
        ("f'{A}/run-{B}'", "runs/run-3"),
        ("os.path.join(A, 'x')", "runs/x"),
        ("[A, B, None]", ["runs", 3, None]),
        ("{'a': B}", {"a": 3}),
        ("torch.bfloat16", "torch.bfloat16"),
        ("not True", False),
        ("(1, 2)", [1, 2]),
    ],
)
def test_what_a_literal_is(expression, expected) -> None:
    assert value(expression, "A = 'runs'\nB = 3") == expected


@pytest.mark.parametrize(
    "expression",
    [
        "f()",
        "unknown",
        "torch.cuda.is_available()",
        "1 if a else 2",
        "f'{A:>3}'",
        "'a' * 10**9",
        "10**9",
        "1 / 0",
        "[1, 2][0]",
        "C",
        "D",
        "(1000000000 * 1000000000) * 5",
    ],
)
def test_what_is_none(expression) -> None:
    held = value(expression, "A = 'x'\nif A: C = 1\nelse: C = 2\nfor D in []: pass")
    assert isinstance(held, Unread)
    assert held.where.startswith("s.py:")


def test_of_several_bindings_the_last_one_above() -> None:
    parsed = Script.parse("a = 1\nb = a\na = 2\nc = a\n", "s.py")
    values = {node.targets[0].id: parsed.value(node.value) for node in parsed.tree.body}  # pyright: ignore
    assert values == {"a": 2, "b": 1, "c": 2}


def test_a_name_that_stands_for_itself_ends() -> None:
    assert isinstance(value("a", "a = b\nb = a"), Unread)


def test_nothing_is_executed(tmp_path) -> None:
    touched = tmp_path / "touched"
    translated(script(before=f"open({str(touched)!r}, 'w').close()"))
    assert not touched.exists()


def test_names_of_both_versions_come_to_the_same() -> None:
    old = ", evaluation_strategy='steps', eval_steps=5, warmup_ratio=0.1"
    new = ", eval_strategy='steps', eval_steps=5, warmup_steps=0.1"
    trainer = ", eval_dataset=load_dataset('json', data_files='e.json', split='train'), "
    one = translated(script(arguments=old, load=", torch_dtype=torch.float32", trainer=f"{trainer}tokenizer=t"))
    other = translated(script(arguments=new, load=", dtype=torch.float32", trainer=f"{trainer}processing_class=t"))
    assert dict(one.config) == dict(other.config)
    assert one.config["data"]["eval"] == "e.json"


def test_fp16_weights_that_train_are_explained() -> None:
    found = translated(script(arguments=", fp16=True", load=", torch_dtype=torch.float16"))
    assert found.config["precision"] == {"compute": "fp16"}
    note = next(note for note in found.notes if note.word.startswith("torch_dtype"))
    assert note.outcome == "changed"
    assert gives(note.why, "fp16")
    assert note.where == "train.py:5:63"


def test_what_the_machine_decides_is_left_to_the_plan() -> None:
    arguments = ", bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(), fp16=False"
    load = ", torch_dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float16, device_map='auto'"
    found = translated(script(arguments=arguments, load=load))
    assert "precision" not in found.config
    changed = [note for note in found.notes if note.outcome == "changed"]
    assert {note.where for note in changed} == {"train.py:5:63", "train.py:7:49"}


@pytest.mark.parametrize(
    ("changes", "code", "where", "named"),
    [
        ({"arguments": ", learning_rate=pick()"}, "SCRIPT", "7:58", ["learning_rate", "pick"]),
        ({"arguments": ", learning_rte=1e-4"}, "SETTING", "7:57", ["learning_rte"]),
        ({"data": "make()"}, "SCRIPT", "8:47", ["make"]),
        ({"data": "data.filter(f)"}, "SCRIPT", "8:47", [".filter"]),
        ({"data": "data.select(chosen)"}, "SCRIPT", "8:47", [".select"]),
        ({"trainer": ", optimizers=(a, b)"}, "SCRIPT", "8:64", ["optimizers"]),
        ({"load": ", max_memory={0: '1GB'}"}, "SCRIPT", "5:62", ["from_pretrained", "max_memory"]),
        ({"before": "DPOTrainer()"}, "SCRIPT", "4:1", ["DPOTrainer"]),
        ({"before": "SFTTrainer()"}, "SCRIPT", "8:1", [2, "SFTTrainer"]),
        ({"before": "def"}, "SCRIPT", "4", ["Python"]),
        ({"arguments": ", **settings"}, "SCRIPT", "7:46", ["settings"]),
        ({"arguments": ", deepspeed='ds.json'"}, "SETTING", "7:54", ["deepspeed", "ds.json"]),
    ],
)
def test_what_cannot_be_read_is_an_error_with_its_place(changes, code, where, named) -> None:
    remedy = ["learning_rate"] if "learning_rte" in named else []
    with raises_fault(f"SF-TRANSLATE-{code}", f"train.py:{where}", *named, remedy=remedy):
        translated(script(**changes))


def test_data_is_followed_back_to_its_file() -> None:
    before = "files = {'train': 'a.json', 'test': 'b.json'}\nraw = load_dataset('json', data_files=files)"
    data = "raw['train'].map(f).shuffle(seed=3).select(range(100))"
    found = translated(script(before=before, data=data, trainer=", eval_dataset=raw['test']"))
    assert found.config["data"]["train"] == {"path": "a.json", "max_samples": 100}
    assert found.config["data"]["eval"] == "b.json"


def test_twin_the_other_split_is_another_file() -> None:
    before = "raw = load_dataset('json', data_files={'train': 'a.json', 'test': 'b.json'})"
    found = translated(script(before=before, data="raw['test']"))
    assert found.config["data"]["train"] == "b.json"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("from surefoot.commands.main import main\nmain(['run'])", "python s.py"),
        ("import surefoot\nsurefoot.train({})", "python s.py"),
        ("from llamafactory.train.tuner import run_exp\nC = 'a/b.yaml'\nrun_exp()", "llamafactory-cli train a/b.yaml"),
        ("import subprocess\nsubprocess.run(['llamafactory-cli', 'train', 'c.yaml'])", "llamafactory-cli train c.yaml"),
    ],
)
def test_a_script_that_hands_on_to_another_program_is_told_what_runs(text, fix):
    with pytest.raises(InputError) as caught:
        translate_file("s.py", text, [], Options())
    assert fix in caught.value.faults[0].fix
    with pytest.raises(InputError) as caught:  # twin: a script of another kind
        translate_file("s.py", "import os", [], Options())
    assert fix not in caught.value.faults[0].fix


@pytest.mark.parametrize("name", ["debug_bos_zero.py", "train_phi3_bos_zero.py"])
def test_a_script_of_a_document_that_is_not_here_is_told_where_it_comes_from(name):
    def fix(program):
        with pytest.raises(InputError) as caught:
            translate_command(["python", program], Options())
        return caught.value.faults[0].fix

    assert "surefoot compat" in fix(name)
    assert name in fix(name)
    assert "surefoot compat" not in fix(f"other_{name}")
