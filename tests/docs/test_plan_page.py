"""docs/plan.md against the code: no choice, no variable is missing or invented."""

import json

from click.testing import CliRunner

from helpers.doc_pages import ROOT, names, table
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, run_config
from surefoot.commands.main import main
from surefoot.planning.plan import Source
from surefoot.report.tables.plan import choice_rows
from surefoot.runs.make_plan import make_plan
from surefoot.system import hardware
from surefoot.system.variables import VARIABLES

PAGE = ROOT / "docs" / "plan.md"


def test_the_choices_are_those_of_a_plan(tmp_path):
    folder = llama3_tokenizer(tmp_path)
    (folder / "config.json").write_text(json.dumps(LLAMA31_8B))
    made = make_plan(run_config(model=str(folder)), hardware=hardware.preset("h100"))
    assert [row[0] for row in table(PAGE, "choice", "what it says")] == [row[0] for row in choice_rows(made)]
    assert {row[0] for row in table(PAGE, "by", "meaning")} == set(Source.__args__)


def test_the_environment_table_has_every_variable_and_its_verdict():
    said = {name: row[1] for row in table(PAGE, "variable", "verdict", "effect") for name in names(row[0])}
    assert said == {name: variable.verdict for name, variable in VARIABLES.items()}


def test_the_refusal_of_fp16_weights_reads_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "a.json").write_text("[]")
    text = "stage: sft\nprecision: {base: fp16}\nmodel: base\ndata: {train: a.json}\noutput: out\n"
    (tmp_path / "my-run.yaml").write_text(text)
    said = CliRunner().invoke(main, ["train", "my-run.yaml"]).stderr.splitlines()[0]
    assert said in PAGE.read_text(encoding="utf-8")
