"""`surefoot export` on the command line: what it prints, what it refuses at once, and what a reader does with it."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from helpers.adapter_runs import a_plan, a_run
from helpers.faults import gives, lines_giving
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main
from surefoot.system.messages import size_text


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli-export")
    a_run(folder / "run", tiny_llama(folder / "base"), a_plan("llama3"))
    return folder


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def test_it_tells_what_was_compared_and_what_lies_there(place, tmp_path):
    result = call(place / "run", "--merge", "--out", tmp_path / "out", "--dtype", "bf16", "--max-shard-size", "40KB")
    assert result.exit_code == 0, result.output
    checks = json.loads((tmp_path / "out" / "export.json").read_text())["checks"]
    assert len(checks) >= 2
    assert gives(result.stdout, 21)  # tensors that come back as they were
    for path in (tmp_path / "out").iterdir():
        size = re.escape(size_text(path.stat().st_size))
        assert re.search(rf"^  {re.escape(path.name)} +{size}$", result.stdout, re.MULTILINE)
    modelfile = (tmp_path / "out" / "Modelfile").read_text()
    assert 'TEMPLATE """' in modelfile
    assert "<|start_header_id|>" in modelfile


def test_the_code_of_the_card_runs_in_a_fresh_process(place, tmp_path, any_python):
    assert call(place / "run", "--merge", "--out", tmp_path / "out", "--no-modelfile").exit_code == 0
    assert not (tmp_path / "out" / "Modelfile").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert lines_giving(card, "`base`", "run", "LoRA", 4, 8, "fp32")
    assert str(place) not in card
    code = card.partition("```python\n")[2].partition("```")[0].replace("max_new_tokens=64", "max_new_tokens=3")
    done = subprocess.run([any_python, "-c", code], cwd=tmp_path / "out", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["{run}", "--out", "{out}", "--max-shard-size", "big"], ["'--max-shard-size':", "'big'"]),
        (["{run}", "--out", "{out}", "--dtype", "int4"], ["'--dtype':", "'int4'", "'stored'", "'bf16'"]),
        (["{run}", "--merge"], ["'--out'"]),
        (["{base}/gone", "--merge", "--out", "{out}"], ["{base}/gone:", "[SF-FILE-MISSING]"]),
        (["{base}", "--adapter", "{base}", "--merge", "--out", "{out}"], ["{base}:", "adapter_config.json"]),
        (["{base}", "--merge", "--out", "{out}"], ["{base}:", "--merge", "[SF-USE-FLAG]"]),
        (["{run}", "--out", "{out}", "--gguf"], ["--gguf:", "--merge", "[SF-USE-FLAG]"]),
        (["{run}", "--merge", "--out", "{run}"], ["{run}:", "export.json", "[SF-USE-OUTPUT]"]),
        (["{run}", "--merge", "--out", "{run}/adapter_config.json"], ["{run}/adapter_config.json:", "[SF-USE-OUTPUT]"]),
    ],
)
def test_wrong_inputs_are_one_line(place, tmp_path, arguments, values):
    words = {"run": place / "run", "base": place / "base", "out": tmp_path / "out"}
    result = call(*(word.format(**words) for word in arguments))
    assert result.exit_code == 2
    assert lines_giving(result.stderr, *(value.format(**words) for value in values))
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_export_is_a_model_like_any_other(place, tmp_path):
    assert call(place / "run", "--merge", "--out", tmp_path / "out").exit_code == 0
    answers = [
        CliRunner().invoke(main, ["generate", str(folder), "--prompt", "A heron?", "--max-new-tokens", "5", "--json"])
        for folder in (place / "run", tmp_path / "out")
    ]
    trained, exported = (json.loads(answer.stdout) for answer in answers)
    assert trained == exported
