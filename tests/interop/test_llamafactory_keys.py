"""Every setting that LLaMA-Factory documents has one outcome, and no given word is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from surefoot.interop import trainer
from surefoot.interop.axolotl import DIALECT as AXOLOTL
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.launch import Options
from surefoot.interop.llamafactory.rows import GROUPS, ROWS
from surefoot.interop.llamafactory.tool import DIALECT as LLAMAFACTORY
from surefoot.interop.registry import translate_file
from surefoot.interop.words import Word
from surefoot.system.errors import InputError

# Its settings and their defaults, group by group: `hparams/*.py` of its version of August 2026.
KEYS = json.loads((Path(__file__).parent / "facts" / "llamafactory.json").read_text())
BASE = {
    "model_name_or_path": "m",
    "stage": "sft",
    "do_train": True,
    "dataset": "identity",
    "template": "llama3",
    "output_dir": "out",
}
# Another value than the default, where making one up from the default's type asks for nonsense.
OTHER = {
    "batch_size": 2, "dataset_dir": "more", "lora_target": "q_proj", "mix_strategy": "interleave_once",
    "flash_attn": "sdpa", "galore_target": "q_proj", "model_revision": "v1", "stage": "dpo", "val_size": 0.1,
    "finetuning_type": "full", "quantization_type": "fp4", "quantization_method": "hqq", "bos_scaling_factor": 0.2,
    "interleave_probs": "0.5,0.5", "max_samples": 5, "lora_alpha": 4, "early_stopping_steps": 3, "template": "qwen",
    "quantization_bit": 8, "eval_dataset": "identity", "optim": "sgd", "lr_scheduler_type": "cosine",
    "report_to": "wandb",
    "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "no", "warmup_ratio": 0.1, "eval_steps": 5,
    "save_total_limit": 2, "data_seed": 3, "neftune_noise_alpha": 5, "tf32": True, "adam_epsilon": 1e-7,
    "adam_beta1": 0.8, "adam_beta2": 0.99, "additional_target": "lm_head", "dataset": "a,b", "max_steps": 10,
    "greater_is_better": False, "torch_compile_mode": "default", "metric_for_best_model": "loss",
}  # fmt: skip


def other(name: str, default: object) -> object:
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "something"


def translate(settings: dict[str, object]):
    return translate_file("run.json", json.dumps(settings), [], Options())


def translated(settings: dict[str, object]):
    """The translation or, where there is none, the faults."""
    try:
        return translate(settings), []
    except InputError as error:
        return None, [str(fault) for fault in error.faults]


def test_every_documented_key_is_a_row_with_its_default():
    assert len(KEYS) == 204
    rows = {name: ROWS[name].default for name in KEYS}
    assert rows == KEYS


def test_no_row_stands_in_two_groups_but_where_both_tools_have_it():
    names = [row.name for group in GROUPS.values() for row in group]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def failing(names: Iterable[str], check: Callable[[str], bool]) -> list[str]:
    """The settings that do not pass."""
    return [name for name in names if not check(name)]


def test_every_word_has_exactly_one_note_or_a_fault():
    def has_one(name: str) -> bool:
        found, faults = translated(BASE | {name: other(name, ROWS[name].default)})
        if found is None:
            return any(name in fault for fault in faults)
        notes = [note for note in found.notes if note.outcome != "assumed" and note.word.startswith(f"{name}:")]
        return len(notes) == 1 and bool(notes[0].keys or notes[0].why) and notes[0].where.startswith("run.json")

    assert failing([*KEYS, *(row.name for row in trainer.ROWS if row.name not in KEYS)], has_one) == []


def test_null_is_as_if_the_word_were_not_there_or_what_its_row_says():
    without = translate(BASE)

    def is_so(name: str) -> bool:
        found, faults = translated(BASE | {name: None})
        if found is None:
            return ROWS[name].when_null is not None and any(name in fault for fault in faults)
        if ROWS[name].when_null is None:
            return found.config == without.config and len(found.notes) == len(without.notes) + 1
        same = translate(BASE | {name: ROWS[name].when_null}).config
        return found.config == same and found.given[name] is None

    assert failing((name for name in KEYS if name not in BASE), is_so) == []


def test_a_default_that_is_written_out_changes_nothing():
    without = translate(BASE).config

    def is_so(name: str) -> bool:
        written = translate(BASE | {name: KEYS[name]}).config
        return all(
            group in written and (values.items() <= written[group].items() if isinstance(values, dict) else
                                  written[group] == values)
            for group, values in without.items()
        )  # fmt: skip

    alone = {"bos_scaling_factor"}  # means nothing without use_bos_zero_training
    assert failing((name for name in KEYS if KEYS[name] is not None and name not in {*BASE, *alone}), is_so) == []


def test_twin_what_fails_is_named():
    assert failing(["seed", "optim"], lambda name: name == "seed") == ["optim"]


def test_a_rule_that_forgets_its_word_is_found_out():
    """The twin: the account at the end fails where a joint row has no rule."""
    rules = tuple(rule for rule in trainer.RULES if rule is not trainer.set_saving)
    dialect = Dialect("X", {row.name: row for row in trainer.ROWS}, rules)
    words = [Word("save_steps", 5, "run.yaml:1:1", "save_steps: 5"), Word("bf16", True, "", "bf16: true")]
    draft = Draft(dialect, words)
    draft.note("bf16", "carried")
    with pytest.raises(InputError) as refused:
        draft.finish("train")
    assert [fault.where for fault in refused.value.faults] == ["run.yaml:1:1"]


def test_secrets_are_shown_nowhere():
    found = translate(BASE | {"hf_hub_token": "hf_abcdefghijkl", "swanlab_api_key": "geheim123"})
    shown = json.dumps([note.word for note in found.notes]) + json.dumps(dict(found.given))
    assert "hf_abcdefghijkl" not in shown
    assert "geheim123" not in shown


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ({"use_apollo": True, "apollo_rank": 8, "apollo_scale_type": "tensor"}, ["use_apollo"]),
        ({"use_kt": True, "kt_optimize_rule": "kt.yaml"}, ["kt_optimize_rule"]),
        ({"finetuning_type": "oft", "oft_block_size": 32}, ["finetuning_type"]),
        (
            {"tensor_model_parallel_size": 4, "sequence_parallel": True},
            ["tensor_model_parallel_size", "sequence_parallel"],
        ),
        ({"appollo_rank": 8}, ["appollo_rank"]),
    ],
)
def test_what_surefoot_lacks_is_refused_once_and_by_its_own_name(words: dict[str, object], refused: list[str]):
    faults = translated(BASE | words)[1]
    assert [next(name for name in words if f": {name}: " in fault) for fault in faults] == refused


def test_a_part_of_a_setting_that_is_off_is_listed():
    found = translate(BASE | {"use_apollo": False, "apollo_rank": 8})
    assert {note.outcome for note in found.notes if "apollo" in note.word} == {"listed"}


@pytest.mark.parametrize("dialect", [LLAMAFACTORY, AXOLOTL])
def test_parts_belong_to_settings_with_a_row(dialect: Dialect):
    assert {whole.partition(":")[0] for whole in dialect.parts.values()} <= dialect.rows.keys()
    assert not any(name.startswith(tuple(dialect.parts)) for name in KEYS)
