"""Advice that can be typed where the user is: in another tool's command, in Python, in a script of commands."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import surefoot
from helpers.tiny_models import tiny_llama
from interop.small_configs import BASES, translated
from surefoot.commands import train as command
from surefoot.commands.doctor.findings import fault
from surefoot.commands.main import main as cli
from surefoot.config.keys import all_keys
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_scalars import scalar_or_text
from surefoot.interop import compat
from surefoot.interop import translation as account
from surefoot.interop.deepspeed_chat import FOLDERS
from surefoot.interop.deepspeed_chat.pipeline import ROWS
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.translation import locate, with_tool_settings
from surefoot.runs.api import _python_advice
from surefoot.system import libraries
from surefoot.system.errors import Fault, InputError

E2E = Path(compat.__file__).parent / "scripts" / "deepspeed_chat" / "e2e_rlhf.py"


def test_a_comment_behind_a_backslash_is_told_as_such():
    words = ["trl", "sft", "--learning_rate", "1e-4", " "]
    with pytest.raises(InputError) as caught:
        translate_command(words, Options())
    (fault,) = caught.value.faults
    assert fault.where == repr(" ")
    assert "1e-4" in fault.what


def test_advice_names_the_words_of_the_command():
    words = "trl sft --model_name_or_path m --dataset_name d --output_dir o --attn_implementation sdpa"
    found = translate_command(words.split(), Options())
    advice = with_tool_settings(
        found, "set attention.implementation: eager, or lower data.max_length; batch.size stays"
    )
    assert advice == "set --attn_implementation eager, or lower --max_length; batch.size stays"
    assert with_tool_settings(found, "run attention.implementations") == "run attention.implementations"


def test_a_file_has_its_keys():
    words = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "attn_implementation": "sdpa"}
    found = translate_file("sft.json", json.dumps(words), [], Options())
    assert with_tool_settings(found, "attention.implementation=eager") == "attn_implementation: eager"


def _advised_values() -> set[tuple[str, str]]:
    """Every `KEY: VALUE` in surefoot's own texts where KEY is a key of the config."""
    rooms = ("planning", "config", "methods", "data", "families", "models", "runs", "training")
    files = (path for room in rooms for path in (Path(surefoot.__file__).parent / room).rglob("*.py"))
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    texts = [node.value for node in constants if isinstance(node.value, str)]
    found = (one for text in texts for one in re.findall(r"(?<![\w.])([a-z_]+\.[a-z_.]+): ([\w-]+)", text))
    return {(key, value) for key, value in found if key in all_keys()}


MORE = {
    "axolotl": {"flash_attention": True, "bf16": True, "optimizer": "adamw_torch", "chat_template": "chatml"},
    "trl": {"attn_implementation": "flash_attention_2", "bf16": True, "packing": True, "optim": "adamw_torch"},
    "factory": {"flash_attn": "fa2", "finetuning_type": "lora", "optim": "adamw_torch", "bf16": True},
    "tune": {},
}


@pytest.mark.parametrize("tool", BASES)
def test_what_is_advised_under_a_name_of_the_tool_means_the_same_there(tool):
    """Every value that surefoot's texts advise: written under the tool's name into the file, or left as surefoot's."""
    found = translated(tool, **MORE[tool])
    pairs = _advised_values()
    told = {pair: with_tool_settings(found, "{}: {}".format(*pair)) for pair in pairs}
    assert len(pairs) > 15
    assert any(said.partition(": ")[0] != key for (key, _), said in told.items()) or not MORE[tool]
    for (key, value), said in told.items():
        name, _, given = said.partition(": ")
        if name == key:
            assert (f"{key}={value}" in said) or said == f"{key}: {value}"  # the latter: no setting of the tool's
        else:
            config = translated(tool, **MORE[tool] | {name: scalar_or_text(given)}).config
            for step in key.split("."):
                config = config[step]
            assert config == scalar_or_text(value), said


@pytest.mark.parametrize(
    ("tool", "advice", "kept"),
    [
        ("axolotl", "use attention.implementation: sdpa, whose kernel", ["attention.implementation=sdpa"]),
        ("factory", "use data.template: alpaca, vicuna or plain", ["data.template=alpaca"]),
        ("factory", "use attention.implementation: sdpa, whose kernel", []),
        ("trl", "set attention.implementation: eager or sdpa", []),
        ("trl", "set attention.implementation: eager or another", ["attention.implementation=eager"]),
    ],
)
def test_a_value_that_the_tool_has_no_word_for_is_given_as_surefoots_own(tool, advice, kept):
    said = with_tool_settings(translated(tool, **MORE[tool]), advice)
    assert re.findall(r"surefoot run (\S+) --", said) == kept
    assert (advice.split()[1] in said) is bool(kept)
    twin = replace(translated(tool, **MORE[tool]), with_value=lambda name, value: {})
    assert "surefoot run" in with_tool_settings(twin, advice)


def test_a_share_that_leaves_nothing_is_told_at_its_flag_and_names_the_file():
    main = f"{FOLDERS['reward']}/main.py --model_name_or_path m --data_path d.json --data_split 1,9,0"
    found = translate_command(main.split(), Options())
    fault = locate(found, Fault("data.train.share", "d.json has nothing to learn in part 1"))
    assert fault.where == "--data_split"
    assert "d.json" in fault.what


def test_flags_are_arguments_in_python():
    with pytest.raises(InputError) as caught, _python_advice():
        raise InputError(Fault("output", "holds a run", "continue it with --resume, replace it with --overwrite"))
    assert "resume=True" in str(caught.value)
    assert "overwrite=True" in caught.value.faults[0].fix
    assert "--" not in str(caught.value)


def test_what_a_check_advises_names_the_words_of_the_command(tmp_path, monkeypatch):
    (tmp_path / "d.json").write_text(json.dumps([{"prompt": "a", "completion": "b"}] * 8))
    found = fault("LOSS-FINITE", "not so", "lower optim.lr")
    monkeypatch.setattr("surefoot.commands.doctor.steps.check_steps", lambda *asked: (found,))
    base, data = tiny_llama(tmp_path / "base"), tmp_path / "d.json"
    words = f"--model_name_or_path {base} --dataset_name {data} --output_dir o --learning_rate 1e9".split()

    def advised():
        return CliRunner().invoke(cli, ["run", "--check", "2", "--", "trl", "sft", *words]).output.splitlines()[-2]

    assert "--learning_rate" in advised()
    monkeypatch.setattr(account, "with_tool_settings", lambda translation, advice: advice)  # twin
    assert "--learning_rate" not in advised()


def test_data_of_a_registry_go_by_their_name():
    config = {"stage": "sft", "model": "m", "data": {"train": [{"path": "data", "name": "herons"}]}, "output": "o"}
    named = command._beginning(RunConfig.model_validate(config))
    del config["data"]["train"][0]["name"]
    assert ("herons" in named, "herons" in command._beginning(RunConfig.model_validate(config))) == (True, False)


def test_without_deepspeed_nothing_is_planned(tmp_path, monkeypatch):
    base = tiny_llama(tmp_path / "base", pad=True)
    (tmp_path / "d.json").write_text(json.dumps([{"prompt": "a", "response": "b"}] * 8))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(libraries, "is_installed", lambda name: name != "deepspeed")
    started = []
    monkeypatch.setattr("surefoot.commands.launching.start_ranks", lambda *words: started.append(words) or 0)
    main = f"{FOLDERS['sft']}/main.py --model_name_or_path {base} --data_path d.json --data_split 1,0,0 --zero_stage 3"
    words = ["run", "--", "deepspeed", "--num_gpus", "2", *main.split(), "--output_dir", "o"]
    told = CliRunner().invoke(cli, words)
    assert (told.exit_code, started) == (2, [])
    assert "--zero_stage" in told.stderr
    monkeypatch.setattr(command, "require_deepspeed", lambda: None)  # twin
    CliRunner().invoke(cli, words)
    assert started


def test_a_script_of_commands_is_no_config(tmp_path):
    script = tmp_path / "run_1.3b.sh"
    script.write_text("deepspeed main.py --model_name_or_path facebook/opt-1.3b\n")
    told = CliRunner().invoke(cli, ["migrate", str(script), "--to", "m"])
    assert told.exit_code == 2
    assert "surefoot translate" in told.stderr


def test_e2e_rlhf_has_help(capsys):
    spec = importlib.util.spec_from_file_location("e2e_rlhf", E2E)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.run_all(["--help"]) == 0
    assert all(f"--{name} " in capsys.readouterr().out for name in list(ROWS)[:1])
