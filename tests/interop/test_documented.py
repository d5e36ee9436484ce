"""Every documented command and config comes to the config that was checked by hand; wrong ones say what and where."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from helpers.faults import gives, refused_settings
from interop.documented import COMMANDS, EXPECTED, FILES
from surefoot.config.overrides import expand_short_forms
from surefoot.config.problems import shape_problems
from surefoot.interop import finetune, train_sft
from surefoot.interop.finetune.rules import GUIDE
from surefoot.interop.launch import Options
from surefoot.interop.registry import file_tool, log_of, tools, translate_command, translate_file
from surefoot.interop.translation import Translation
from surefoot.system.errors import Fault, InputError

TOOLS = {"sft_config.yaml": "TRL", ".yml": "Axolotl", ".yaml": "torchtune", ".py": "Hugging Face"}


def read(path: str) -> str:
    if path in FILES:
        return FILES[path]
    raise InputError(Fault(path, "cannot be read"))


OPTIONS = Options(read=read)


def command(text: str) -> Translation:
    return translate_command(shlex.split(text), OPTIONS)


def translated(name: str) -> Translation:
    return command(COMMANDS[name]) if name in COMMANDS else translate_file(name, FILES[name], [], OPTIONS)


def outcomes(found: Translation) -> dict[str, str]:
    return {note.word: note.outcome for note in found.notes}


def test_documented_words_come_to_the_config_checked_by_hand() -> None:
    for name, expected in EXPECTED.items():
        found = translated(name)
        assert dict(found.config) == expected, name
        assert shape_problems(expand_short_forms(dict(found.config))) == []
        assert all(note.why or note.outcome == "carried" for note in found.notes), name


def test_the_table_is_whole() -> None:
    assert set(EXPECTED) == {*COMMANDS, *FILES}
    assert len(EXPECTED) >= 25


def test_twin_one_changed_value_is_noticed() -> None:
    found = command(COMMANDS["trl-lora"].replace("--lora_alpha 16", "--lora_alpha 17"))
    assert dict(found.config) != EXPECTED["trl-lora"]


def test_a_file_belongs_to_one_tool() -> None:
    for name, text in FILES.items():
        claimed = [tool.name for tool in tools() if tool.from_file and tool.claims_file(name, text)]
        assert claimed == [next(tool for ending, tool in TOOLS.items() if name.endswith(ending))]


def test_our_own_config_belongs_to_nobody() -> None:
    own = "stage: sft\nmodel: m\ndata: {train: d.json}\ntokenizer: {pad: add}\noutput: o\n"
    assert file_tool("run.yaml", own) is None


WRONG = {  # command -> the setting that is refused
    "finetune.py --lora_r 8": "base_model",
    "finetune.py --base_model m --adapter_name bottleneck": "adapter_name",
    "finetune.py --base_model m --adapter_name prefix-tuning": "adapter_name",
    "finetune.py --base_model m --bf16 --fp16": "fp16",
    "finetune.py --base_model m --batch_size 4 --micro_batch_size 8": "micro_batch_size",
    "finetune.py --base_model m --learning_rate fast": "learning_rate",
    "finetune.py --base_model m --dora_simple False": "dora_simple",
    "finetune.py --base_model m --Wdecompose_target_modules q_proj": "Wdecompose_target_modules",
    "finetune.py --base_model m --resume_from_checkpoint elsewhere/checkpoint-3": "resume_from_checkpoint",
    "train_sft.py --model m --data d": "out",
    "trl sft --model_name_or_path m --dataset_name d --packing --packing_strategy wrapped": "packing_strategy",
    "trl sft --dataset_name d": "model_name_or_path",
    "axolotl train lora.yml --optimizer muon": "optimizer",
    "tune run lora_finetune_single_device --config lora.yaml dataset.packed=True": "dataset.packed",
}
MEANT = {  # command -> what its last word is likely to mean
    "finetune.py --base_model m --lora_rank 8": "lora_r",
    "train_sft.py --model m --data d --out o --compile-mode over-head": "reduce-overhead",
    "train_sft.py --model m --data d --out o --acum 3": "accum",
    "trl sft --model_name_or_path m --dataset_name d --lora_alfa 3": "lora_alpha",
    "trl sft --model_name_or_path m --dataset_name d --lora_rank 3": "lora_r",
    "axolotl train lora.yml --adaptor lora": "adapter",
    "tune run lora_finetune_single_device --config lora.yaml model.lora_rnk=3": "model.lora_rank",
}
NOT_READ = {  # command -> code, and the fault's place
    "trl distillation --model_name_or_path m": ("SF-TRANSLATE-COMMAND", "trl distillation"),
    "axolotl inference lora.yml": ("SF-TRANSLATE-COMMAND", "axolotl"),
    "tune run ppo_single_device --config lora.yaml": ("SF-TRANSLATE-COMMAND", "tune run ppo_single_device"),
    "tune run lora_finetune_single_device --config llama3_1/8B_lora": ("SF-TRANSLATE-COMMAND", "llama3_1/8B_lora"),
    "python simple_finetune.py --lr 3": ("SF-TRANSLATE-SCRIPT", "--lr 3"),
    "axolotl train nowhere.yml": ("", "nowhere.yml"),
    "python nowhere.py --lr 3": ("", "nowhere.py"),
}


def check_each_flag_has_its_meaning(rows) -> None:
    meanings = [row.about for row in rows if row.about]
    assert len(meanings) > 10
    assert len(set(meanings)) == len(meanings)


def test_each_flag_of_train_sft_has_its_meaning():
    check_each_flag_has_its_meaning(train_sft.ROWS.values())


def test_twin_one_remark_on_all_flags_is_noticed():
    same = [replace(row, about="the notes do not name it") for row in train_sft.ROWS.values()]
    with pytest.raises(AssertionError):
        check_each_flag_has_its_meaning(same)


def only_fault(text: str) -> Fault:
    with pytest.raises(InputError) as caught:
        command(text)
    (fault,) = caught.value.faults
    return fault


def test_a_wrong_word_is_one_fault_at_its_setting() -> None:
    assert {text: refused_settings(lambda text=text: command(text)) for text in WRONG} == {
        text: [name] for text, name in WRONG.items()
    }


def test_a_mistyped_word_is_told_what_was_meant() -> None:
    assert [text for text, name in MEANT.items() if f"mean {name}?" not in only_fault(text).fix] == []


def test_a_command_that_is_not_read_says_where() -> None:
    found = {text: only_fault(text) for text in NOT_READ}
    assert {text: (fault.code, fault.where) for text, fault in found.items()} == NOT_READ


def test_lists_in_every_spelling() -> None:
    spellings = ["q_proj v_proj", "q_proj,v_proj", '\'["q_proj", "v_proj"]\'', "\"['q_proj','v_proj']\"",
                 "\"('q_proj', 'v_proj')\"", "[q_proj, v_proj]", "[q_proj,v_proj]"]  # fmt: skip
    for spelling in spellings:
        found = command(f"finetune.py --base_model m --target_modules {spelling} --lora_r 4")
        assert found.config["adapter"]["targets"] == ["q_proj", "v_proj"], spelling
        assert found.config["adapter"]["rank"] == 4


def test_switches_in_every_spelling() -> None:
    spellings = {
        "bf16": ("--bf16", "--bf16=True", "--bf16 True", "--bf16=true", "--nobf16 --bf16"),
        "fp32": ("", "--bf16=False", "--bf16 False", "--nobf16"),
    }
    for compute, flags in spellings.items():
        for flag in flags:
            assert command(f"finetune.py --base_model m {flag}").config["precision"]["compute"] == compute, flag


def test_keyword_arguments_come_to_the_same_as_flags() -> None:
    given = {"base_model": "meta-llama/Llama-3.1-8B", "adapter_name": "dora", "lora_r": 32, "lora_alpha": 64}
    found = finetune.from_keywords({**given, "bf16": True, "target_modules": None})
    assert dict(found.config) == EXPECTED["guide-before"]


@pytest.mark.parametrize(
    ("files", "pad"),
    [
        ({}, "add"),
        ({"m/tokenizer_config.json": "{}"}, "add"),
        ({"m/tokenizer_config.json": '{"pad_token": "!", "added_tokens_decoder": {}}'}, "add"),
        (
            {
                "m/tokenizer_config.json": '{"pad_token": {"content": "<pad>"}, "added_tokens_decoder": '
                '{"0": {"content": "<pad>", "special": true}}}'
            },
            "auto",
        ),
        (
            {
                "m/tokenizer_config.json": '{"pad_token": "!", "added_tokens_decoder": '
                '{"0": {"content": "!", "special": false}}}'
            },
            "add",
        ),
    ],
)
def test_the_pad_rule_of_the_guide(files: dict[str, str], pad: str) -> None:
    def local(path: str) -> str:
        if path in files:
            return files[path]
        raise InputError(Fault(path, "cannot be read"))

    found = translate_command(["finetune.py", "--base_model", "m"], Options(read=local))
    assert found.config.get("tokenizer", {"pad": "auto"})["pad"] == pad


def test_words_that_the_original_never_used_are_listed() -> None:
    found = command("finetune.py --base_model m --lora_target_modules q_proj --bottleneck_size 64 --group_by_length")
    assert set(outcomes(found).values()) >= {"listed"}
    assert outcomes(found)["--lora_target_modules q_proj"] == "listed"
    assert outcomes(found)["--bottleneck_size 64"] == "listed"


def test_a_batch_that_does_not_divide_is_exact_and_said() -> None:
    found = command("finetune.py --base_model m --batch_size 10 --micro_batch_size 4")
    assert found.config["batch"] == {"size": 10, "micro": 4}
    assert gives(next(note.why for note in found.notes if note.word == "--batch_size 10"), 8)


def test_resuming_in_the_run_folder() -> None:
    found = command("finetune.py --base_model m --output_dir out --resume_from_checkpoint out/checkpoint-8")
    assert found.arguments == ("--resume",)


def test_the_banner_lists_every_argument() -> None:
    lines = log_of(command(COMMANDS["guide-before"])).started()
    assert lines[0] == "Finetuning model with params:"
    assert {"attn_implementation: eager", "disable_cudnn_sdpa: True", "lora_r: 32", "bf16: True"} <= set(lines)
    assert len(lines) == 1 + len(finetune.PROGRAMS[GUIDE])


def test_train_sft_asks_for_profiles_at_every_step() -> None:
    assert command(COMMANDS["train-sft"]).arguments == ("--time-every", "1")


def test_allow_unknown_lists_what_nobody_knows() -> None:
    words = shlex.split("axolotl train lora.yml --adaptor lora")
    found = translate_command(words, Options(allow_unknown=True, read=read))
    assert outcomes(found)["--adaptor lora"] == "listed"
