"""Names of modules in every spelling; a pattern is refused, since its parts are no names."""

from __future__ import annotations

import shlex

import pytest

from surefoot.interop.launch import Options
from surefoot.interop.modules import module_names
from surefoot.interop.tools import translate_command, translate_file
from surefoot.system.errors import InputError


@pytest.mark.parametrize("text", ["q_proj,v_proj", "q_proj v_proj", "['q_proj', 'v_proj']", "('q_proj','v_proj')"])
def test_names(text):
    assert module_names(text) == ["q_proj", "v_proj"]


def test_names_below_others():
    assert module_names("layers.0.self_attn.q_proj") == ["layers.0.self_attn.q_proj"]


PATTERNS = [".*(q|v)_proj", "model.layers.[0-9]+.self_attn.(q|k|v|o)_proj", "(q|v)_proj", "q_proj$", "[qv]_proj"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_twin_a_pattern_is_no_name(pattern):
    with pytest.raises(ValueError, match="no pattern"):
        module_names(pattern)
    words = ["--model_name_or_path", "m", "--dataset_name", "d", "--use_peft", "--lora_target_modules", pattern]
    with pytest.raises(InputError, match="no pattern"):
        translate_command(["trl", "sft", *words], Options())
    axolotl = (
        "base_model: m\ndatasets: [{path: d, type: alpaca}]\nadapter: lora\nlora_r: 8\nlora_alpha: 8\n"
        f"learning_rate: 1e-4\nlora_target_modules: '{pattern}'\n"
    )
    with pytest.raises(InputError, match="no pattern"):
        translate_file("run.yml", axolotl, [], Options())


@pytest.mark.parametrize("spelling", ["q_proj,v_proj", "q_proj v_proj", "'q_proj, v_proj'"])
def test_llamafactory_takes_blanks_as_trl_does(spelling):
    words = f"llamafactory-cli train --model_name_or_path m --stage sft --do_train --dataset a --template llama3 \
        --output_dir out --lora_target {spelling} --lora_rank 4"
    config = translate_command(shlex.split(words), Options()).config
    assert (config["adapter"]["targets"], config["adapter"]["rank"]) == (["q_proj", "v_proj"], 4)
