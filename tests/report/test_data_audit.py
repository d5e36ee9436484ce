"""The audit can be read without colours, holds no escape codes on a pipe, and no path of this machine in data.json."""

import dataclasses
import io
import json
import re

import pytest
import rich.console
from transformers import AutoTokenizer

from helpers.faults import gives
from helpers.prepared import prepared
from helpers.tiny_models import llama3_tokenizer
from surefoot.data.audit import Sample, SamplePart
from surefoot.data.prepare import PreparedData
from surefoot.report.console import as_plain_text
from surefoot.report.data_audit import audit_to_json
from surefoot.report.tables.audit import audit_report, audit_views


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PreparedData:
    folder = tmp_path_factory.mktemp("audit")
    tokenizer = AutoTokenizer.from_pretrained(llama3_tokenizer(folder / "tokenizer"))
    records = [{"instruction": f"Add {n} and 1!", "output": f"It is\n{n + 1}."} for n in range(10)]
    (folder / "d.json").write_text(json.dumps([*records, records[0]]), encoding="utf-8")
    return prepared(folder / "d.json", tokenizer, folder / "cache", 3, template_asked=False, max_length=64)


def on_a_terminal(data: PreparedData) -> str:
    out = io.StringIO()
    rich.console.Console(file=out, force_terminal=True, color_system="standard", width=120).print(audit_report(data))
    return out.getvalue()


def test_plain_text_marks_what_is_learned(data):
    text = as_plain_text(audit_report(data))
    assert "\x1b" not in text
    assert "\r" not in text
    assert gives(text.partition("\n")[0], data.audit.source.file)
    rows = {line.split()[0]: line for line in reversed(text.splitlines()) if line.strip()}  # the first of a name
    assert re.findall(r"\d+", rows["examples"]) == ["8", "11", "3", "0", "0"]  # of records, held out, dropped, cut
    assert gives(rows["BOS"], "<|begin_of_text|>")
    assert all(gives(rows["stop"], value) for value in (8, "<|end_of_text|>", "<|eot_id|>"))
    assert gives(rows["PAD"], "<|end_of_text|>")
    first = data.audit.samples[0].number - 1
    assert f"\n\n    ⟦It is\n    {first + 1}.<|eot_id|>⟧" in text
    assert text.count("⟦") == text.count("⟧") == 4  # three samples and the line that explains the marks


def test_a_terminal_gets_colour_besides_the_marks(data):
    text = on_a_terminal(data)
    assert "\x1b[1;32m⟦" in text
    assert text.count("⟦") == 4


def test_texts_cannot_talk_to_the_terminal(data):
    hostile = Sample(1, 1, 3, (SamplePart("\x1b[2J\r\x07[red]\u202e", False, False), SamplePart("a\tb", True, False)))
    disguised = dataclasses.replace(data, audit=dataclasses.replace(data.audit, samples=(hostile,)))
    text = as_plain_text(audit_report(disguised))
    assert "\\x1b[2J\\r\\x07[red]\\u202e⟦a\\tb⟧" in text
    assert "\x1b[2J" not in on_a_terminal(disguised)


def test_long_stretches_are_shortened_and_say_so(data):
    long = Sample(1, 1, 3, (SamplePart("x" * 2000, True, False),))
    text = as_plain_text(
        audit_report(dataclasses.replace(data, audit=dataclasses.replace(data.audit, samples=(long,))))
    )
    assert gives(text, "1,560")


def test_json_is_plain_and_free_of_machine_paths(data):
    assert data.audit.source.file.startswith("/")
    facts = json.loads(json.dumps(audit_to_json(data), allow_nan=False))
    assert facts["train"]["file"] == "d.json"
    assert "/" not in json.dumps({name: facts[name]["file"] for name in ("train", "eval")})
    assert facts["train"]["examples"] + facts["eval"]["examples"] == facts["train"]["records"] == 11
    shown = dict(audit_views(facts)[0].facts)
    assert re.findall(r"\d+", shown["examples"])[:4] == ["8", "11", "3", "0"]
    assert facts["train"]["sha256"] == facts["eval"]["sha256"] == data.audit.source.sha256
    assert facts["train"]["samples"][0]["parts"][0] == {
        "text": "<|begin_of_text|><|start_header_id|>",
        "supervised": False,
        "control": True,
    }
    sums = [part for sample in facts["train"]["samples"] for part in sample["parts"] if part["supervised"]]
    assert all(part["text"] for part in sums)


def test_a_relative_name_is_kept_as_given(data):
    source = dataclasses.replace(data.audit.source, file="../data/d.json")
    audit = dataclasses.replace(data.audit, source=source)
    relative = dataclasses.replace(data, audit=audit, sources=(audit,), eval=None, eval_audit=None, eval_sources=())
    facts = audit_to_json(relative)
    assert facts["train"]["file"] == "../data/d.json"
    assert facts["eval"] is None
    assert "evaluation data" not in as_plain_text(audit_report(relative))
