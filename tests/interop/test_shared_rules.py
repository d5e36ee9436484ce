"""Names of modules in every spelling; a pattern is refused, since its parts are no names.
A checkpoint that is named must be the one that surefoot goes on from; one that is looked for need not be there.
"""

from __future__ import annotations

import shlex

import pytest

from helpers.faults import refused_settings
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.shared_rules import module_names


@pytest.mark.parametrize("text", ["q_proj,v_proj", "q_proj v_proj", "['q_proj', 'v_proj']", "('q_proj','v_proj')"])
def test_names(text):
    assert module_names(text) == ["q_proj", "v_proj"]


def test_names_below_others():
    assert module_names("layers.0.self_attn.q_proj") == ["layers.0.self_attn.q_proj"]


PATTERNS = [".*(q|v)_proj", "model.layers.[0-9]+.self_attn.(q|k|v|o)_proj", "(q|v)_proj", "q_proj$", "[qv]_proj"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_twin_a_pattern_is_no_name(pattern):
    with pytest.raises(ValueError):
        module_names(pattern)
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--use_peft", "--lora_target_modules", pattern]
    assert refused_settings(lambda: translate_command(["trl", "sft", *words], Options())) == ["lora_target_modules"]
    axolotl = (
        "base_model: m\ndatasets: [{path: d, type: alpaca}]\nadapter: lora\nlora_r: 8\nlora_alpha: 8\n"
        f"learning_rate: 1e-4\nlora_target_modules: '{pattern}'\n"
    )
    found = refused_settings(lambda: translate_file("run.yml", axolotl, [], Options()), text=axolotl)
    assert found == ["lora_target_modules"]


@pytest.mark.parametrize("spelling", ["q_proj,v_proj", "q_proj v_proj", "'q_proj, v_proj'"])
def test_llamafactory_takes_blanks_as_trl_does(spelling):
    words = f"llamafactory-cli train --model_name_or_path m --stage sft --do_train --dataset a --template llama3 \
        --output_dir out --lora_target {spelling} --lora_rank 4"
    config = translate_command(shlex.split(words), Options()).config
    assert (config["adapter"]["targets"], config["adapter"]["rank"]) == (["q_proj", "v_proj"], 4)


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
    ("named", "newest", "code"),
    [
        ("out/checkpoint-7", "checkpoint-52", "SF-RESUME-CHANGED"),
        ("out/checkpoint-500", None, "SF-CHECKPOINT-NONE"),
        ("True", None, "SF-CHECKPOINT-NONE"),
        ("elsewhere/checkpoint-7", "checkpoint-7", "SF-TRANSLATE-SETTING"),
    ],
)
def test_twin_what_is_not_there_is_refused(words, named, newest, code):
    assert refused_settings(lambda: arguments(f"{words} {named}", newest), code) == ["resume_from_checkpoint"]


def test_a_tool_that_looks_for_one_itself_starts_without():
    assert arguments(LLAMAFACTORY, None) == ("--resume",)
