"""Faults of what a run is given and of its numbers, a function each. For `faults_elsewhere.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fault_rows import flip, halved, make_table, payload
from fault_trial import Raw, Trial

_NORM = "model.layers.1.input_layernorm.weight"
_QUERY = "model.layers.1.self_attn.q_proj.weight"
INPUTS, row = make_table()
LINE = "refused, file and line named"
NAMED = "refused, named"
SAME = "goes on, same end"

# --- data ------------------------------------------------------------------------------------------------------------


@row("data: malformed JSON in line 7", LINE, r"train\.jsonl", r"(row|line) [67]\b|:7:")
def malformed(trial: Trial) -> None:
    trial.lines(lambda own: own.__setitem__(6, own[6].replace('": "', '" "', 1)))
    trial.train()


@row("data: last line cut off", LINE, r"train\.jsonl", r"(row|line) 1[12]\b|:12:")
def cut_line(trial: Trial) -> None:
    trial.data.write_text(trial.data.read_text()[:-12])
    trial.train()


@row("data: empty file", NAMED, r"train\.jsonl", r"empty|0 records|no (data|rows|records|examples)")
def empty(trial: Trial) -> None:
    trial.data.write_text("")
    trial.train()


@row("data: byte order mark and CRLF", SAME)
def marked(trial: Trial) -> None:
    trial.data.write_bytes(b"\xef\xbb\xbf" + trial.data.read_bytes().replace(b"\n", b"\r\n"))
    trial.train()


@row("data: Latin-1", LINE, r"train\.jsonl", r"utf-?8")
def latin(trial: Trial) -> None:
    trial.row(7, output="hér")
    text = trial.data.read_text().encode().decode("unicode_escape")
    trial.data.write_bytes(text.encode("latin-1"))
    trial.train()


@row(
    "data: the answers' column has another name",
    NAMED,
    r"KeyError: 'output'|column.{0,80}output|output.{0,80}column|'answer'",
)
def renamed(trial: Trial) -> None:
    trial.lines(lambda own: own.__setitem__(slice(None), [line.replace('"output"', '"answer"') for line in own]))
    trial.train()


@row("data: no answer in row 5", LINE, r"train\.jsonl", r"(row|line|index) [45]\b|:5\b")
def missing(trial: Trial) -> None:
    trial.row(5, output=None)
    trial.train()


@row("data: a number for the answer in row 5", LINE, r"train\.jsonl", r"(row|line|index) [45]\b|:5\b")
def mixed(trial: Trial) -> None:
    trial.row(5, output=4)
    trial.train()


@row("data: a key twice in row 5", LINE, r"train\.jsonl", r"duplicate|twice")
def twice(trial: Trial) -> None:
    trial.lines(lambda own: own.__setitem__(4, own[4].replace("{", '{"output": "else", ', 1)))
    trial.train()


@row("data: all answers beyond the length", NAMED, r"cutoff_len|max_length", r"label|supervised|learn|answer")
def all_cut(trial: Trial) -> None:
    trial.change("length", 8)
    trial.train()


# --- model and tokenizer ---------------------------------------------------------------------------------------------


@row("model: weights cut in half", NAMED, r"model\.safetensors")
def cut_model(trial: Trial) -> None:
    halved(trial.base("model.safetensors"))
    trial.train()


@row(
    "model: one bit flipped in the base, between run and resume",
    NAMED,
    r"base/model\.safetensors|base model.{0,60}(chang|differ|another|not what)",
)
def flipped_base(trial: Trial) -> None:
    trial.resumable()
    flip(trial.base("model.safetensors"), -1000)
    trial.train(resume=True)


@row("model: NaN in a norm's weight", "refused, tensor named", re.escape(_NORM))
def poisoned(trial: Trial) -> None:
    _tensors(trial, lambda own: own[_NORM][3:4].fill_(torch.nan))
    trial.train()


@row("model: a tensor is missing", "refused, tensor named", r"layers\.1\.self_attn\.q_proj")
def no_tensor(trial: Trial) -> None:
    _tensors(trial, lambda own: own.pop(_QUERY))
    trial.train()


@row("model: pickled weights with a payload", "refused, nothing run", r"pickle|weights_only|pytorch_model\.bin")
def pickled(trial: Trial) -> None:
    trial.base("model.safetensors").unlink()
    trial.base("pytorch_model.bin").write_bytes(payload(trial))
    trial.train()


@row("template: runs a command", "refused, nothing run", r"template|__globals__|unsafe|SecurityError")
def command(trial: Trial) -> None:
    _template(trial, "{{ lipsum.__globals__['os'].system('touch marker') }}")
    trial.train()


@row("template: never ends", NAMED, r"template")
def endless(trial: Trial) -> None:
    _template(trial, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    trial.train()


@row("template: writes BOS twice", NAMED, r"\bBOS\b|begin.of", r"twice|double|2 times|once")
def doubled(trial: Trial) -> None:
    _template(trial, "{{ bos_token }}")
    trial.train()


@row(
    "tokenizer: PAD is a letter of the texts",
    "refused or replaced, named; or " + SAME,
    r"\bpad\b.{0,80}(text|contain|ordinary|occurs)",
)
def common_pad(trial: Trial) -> None:
    _json(trial.base("tokenizer_config.json"), pad_token="e")
    trial.train()


# --- settings --------------------------------------------------------------------------------------------------------


@row("settings: a typo in a key", "refused, key and the right one named", r"learning_rte")
def typo(trial: Trial) -> None:
    trial.change("learning_rte", 0.01)
    trial.train()


@row("settings: the rate is NaN", NAMED, r"learning.rate|optim\.lr", r"\bnan\b|greater than 0|finite")
def nan_rate(trial: Trial) -> None:
    trial.change("lr", Raw(".nan"))
    trial.train()


@row("settings: 1e-2 without a point, which YAML 1.1 reads as text", SAME)
def text_rate(trial: Trial) -> None:
    trial.change("lr", Raw("1e-2"))
    trial.train()


@row("settings: an adapter for layers that are not there", "refused, named with what there is", r"q_prj")
def no_target(trial: Trial) -> None:
    trial.change("targets", ["q_prj"] if trial.side.child == "surefoot" else "q_prj")
    trial.train()


# --- numbers ---------------------------------------------------------------------------------------------------------

NOT_FINITE = r"not finite|non-finite|non_finite|nan or inf"


@row("numbers: one layer gives NaN, once, in step 3", "step skipped, said, finite weights", NOT_FINITE)
def one_nan(trial: Trial) -> None:
    trial.train(at="step", n=2, do="nan")
    trial.note = _logged_zero(trial)


@row("numbers: the rate is 1e30, no clipping", "stopped, said", NOT_FINITE + "|diverge")
def diverges(trial: Trial) -> None:
    trial.change("lr", 1e30)
    trial.change("clip", None if trial.side.child == "surefoot" else 0.0)
    trial.train()
    trial.note = _logged_zero(trial)


# --- how ---


def _tensors(trial: Trial, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = trial.base("model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _template(trial: Trial, before: str) -> None:
    path = trial.base("chat_template.jinja")
    path.write_text(before + path.read_text())


def _json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _logged_zero(trial: Trial) -> str:
    """Whether a loss of 0 was logged, which no step of such a run has."""
    return "logs a loss of 0" if re.search(r"'loss': '?0(\.0+)?\b[^.]", trial.output()) else ""
