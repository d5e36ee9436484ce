"""A checkpoint that is named must be the one that surefoot goes on from; one that is looked for need not be there."""

from __future__ import annotations

import shlex

import pytest

from surefoot.interop.launch import Options
from surefoot.interop.tools import translate_command
from surefoot.system.errors import InputError

TRL = "trl sft --model_name_or_path m --dataset_name d --output_dir out --resume_from_checkpoint"
LLAMAFACTORY = "llamafactory-cli train --model_name_or_path m --stage sft --do_train --dataset a --output_dir out"
FINETUNE = "finetune.py --base_model m --output_dir out --resume_from_checkpoint"


def arguments(words: str, newest: str | None) -> tuple[str, ...]:
    def look(run: str) -> str | None:
        assert run == "out"
        return newest

    return translate_command(shlex.split(words), Options(newest=look)).arguments


@pytest.mark.parametrize("words", [TRL, FINETUNE, f"{LLAMAFACTORY} --resume_from_checkpoint"])
@pytest.mark.parametrize("named", ["True", "out", "out/checkpoint-52", "./out/checkpoint-52/"])
def test_what_is_there_is_gone_on_with(words, named):
    assert arguments(f"{words} {named}", "checkpoint-52") == ("--resume",)


@pytest.mark.parametrize("words", [TRL, FINETUNE, f"{LLAMAFACTORY} --resume_from_checkpoint"])
@pytest.mark.parametrize(
    ("named", "newest", "said"),
    [
        ("out/checkpoint-7", "checkpoint-52", "the newest that verifies is checkpoint-52"),
        ("out/checkpoint-500", None, "holds no checkpoint"),
        ("True", None, "holds no checkpoint"),
        ("elsewhere/checkpoint-7", "checkpoint-7", "in its own folder only"),
    ],
)
def test_twin_what_is_not_there_is_refused(words, named, newest, said):
    with pytest.raises(InputError, match=said) as caught:
        arguments(f"{words} {named}", newest)
    assert str(caught.value).startswith("--resume_from_checkpoint")


def test_a_tool_that_looks_for_one_itself_starts_without():
    assert arguments(LLAMAFACTORY, None) == ("--resume",)
