"""Names of modules in every spelling; a pattern is refused, since its parts are no names.
A checkpoint that is named must be the one that surefoot goes on from; one that is looked for need not be there.
"""

from __future__ import annotations

import shlex

import pytest

from helpers.faults import raises_fault, refused_settings
from surefoot.data.batching.order import part_of
from surefoot.interop.adapters import module_names
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.settings import Refusal
from surefoot.interop.shared_rules import parse_split


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
    found = translate_command(["trl", "sft", *words], Options())
    assert found.config["adapter"]["targets"] == [f"re:{pattern}"]  # TRL makes a text of a list of one
    assert refused_settings(lambda: translate_command(["trl", "sft", *words, "x"], Options())) == [
        "lora_target_modules"
    ]
    axolotl = (
        "base_model: m\ndatasets: [{path: d, type: alpaca}]\nadapter: lora\nlora_r: 8\nlora_alpha: 8\n"
        "learning_rate: 1e-4\nlora_target_modules: "
    )
    one = translate_file("run.yml", f"{axolotl}'{pattern}'\n", [], Options())
    assert one.config["adapter"]["targets"] == [f"re:{pattern}"]  # Axolotl gives a text to PEFT, which takes it so
    several = f"{axolotl}['{pattern}']\n"
    found = refused_settings(lambda: translate_file("run.yml", several, [], Options()), text=several)
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


def cut_by_datasets(count: int, start: int, end: int) -> range:
    """`datasets` 5: each border of a slice in percent is rounded to the closest record."""
    return range(round(start * count / 100), round(end * count / 100))


@pytest.mark.parametrize("count", [3, 50, 1001])
@pytest.mark.parametrize(
    ("text", "borders"),
    [("[:95%]", (0, 95)), ("[95%:]", (95, 100)), ("[10%:30%]", (10, 30)), ("[-5%:]", (95, 100)), ("[:-50%]", (0, 50))],
)
def test_a_share_of_a_split_has_the_records_of_datasets(text: str, borders: tuple[int, int], count: int) -> None:
    name, part = parse_split(f"train{text}")
    share = part["share"]
    expected = list(cut_by_datasets(count, *borders))
    assert name == "train"
    assert share["in_order"] is True
    if expected:
        assert part_of(count, share["of"], share["take"], None).tolist() == expected
        assert part_of(count, share["of"], share["take"], 0).tolist() != expected or count == 3  # the twin: shuffled
    else:
        with raises_fault("SF-DATA-SHARES", "share"):
            part_of(count, share["of"], share["take"], None)


@pytest.mark.parametrize(
    "text", ["train[10:]", "train[:-10]", "train[50%:50%]", "train[:120%]", "train+test", "train["]
)
def test_other_slices_of_a_split_are_refused(text: str) -> None:
    with pytest.raises(Refusal):
        parse_split(text)


def test_whole_splits_select_nothing() -> None:
    assert parse_split("train") == parse_split("train[0%:100%]") == ("train", {})
    assert parse_split("train[:7]") == ("train", {"max_samples": 7})


@pytest.mark.parametrize(("word", "micro"), [("--auto_find_batch_size", "auto"), ("", 8)])
def test_a_batch_that_is_found_keeps_the_examples_of_a_step(word, micro):
    command = f"trl sft --model_name_or_path m --dataset_name d --gradient_accumulation_steps 2 {word}"
    batch = translate_command(shlex.split(command), Options()).config["batch"]
    assert (batch["size"], batch["micro"]) == (16, micro)
