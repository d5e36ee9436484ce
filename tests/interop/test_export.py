"""The way back: a config that is written for a tool comes back, and what does not is told."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import raises_fault
from interop import documented
from interop.small_configs import translated as small
from interop.test_documented import translated
from surefoot.config.dump import plain_config
from surefoot.config.load import check_config
from surefoot.config.overrides import expand_short_forms
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import parse_value
from surefoot.data.sources.resolve import SourceSpec, open_sources
from surefoot.interop import export as way_back
from surefoot.interop.axolotl import back as axolotl_back
from surefoot.interop.axolotl.layouts import read_layout
from surefoot.interop.backward import Ours, interval, keeps_best, micro, passes, schedule
from surefoot.interop.export import Written, export, targets
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
from surefoot.interop.settings import Refusal
from surefoot.interop.translation import Translation
from surefoot.system.errors import Fault, InputError

RECIPES = Path(__file__).parents[2] / "recipes"
TOOLS = {"Axolotl": "axolotl", "LLaMA-Factory": "llamafactory", "TRL": "trl"}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
PAIRS = {"datasets": [{"path": "d.jsonl", "type": "chatml.intel"}]}
PEFT = {"use_peft": True, "lora_r": 8}
# Configs of each tool that differ in what is translated with care.
VARIATIONS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("axolotl", {**LORA, "load_in_4bit": True, "adapter": "qlora", "sample_packing": True, "flash_attention": True,
                 "micro_batch_size": 2, "sequence_len": 1024}),
    ("axolotl", {**LORA, "lora_target_linear": True, "warmup_steps": 10, "cosine_min_lr_ratio": 0.1, "bf16": True}),
    ("axolotl", {**PAIRS, "rl": "ipo", "rl_beta": 0.3, "val_set_size": 0.1, "eval_steps": 20, "save_steps": 40,
                 "load_best_model_at_end": True}),
    ("axolotl", {"rl": "simpo", **PAIRS, "simpo_gamma": 1.0, "cpo_alpha": 0.5, "max_steps": 7}),
    ("axolotl", {"rl": "dpo", **PAIRS, "dpo_loss_type": ["hinge", "sft"], "dpo_loss_weights": [1.0, 0.2]}),
    ("axolotl", {"reward_model": True, "datasets": [{"path": "d.jsonl", "type": "bradley_terry.llama3"}]}),
    ("axolotl", {"datasets": [{"path": "d.jsonl", "type": "chat_template", "split": "train[:90%]"}],
                 "chat_template": "llama3", "use_wandb": True, "wandb_project": "p", "wandb_name": "n"}),
    ("axolotl", {"datasets": [{"path": "d.jsonl", "type": "completion", "field": "story"}], "optimizer": "sgd"}),
    ("axolotl", {"datasets": [{"path": "org/d"}]}),  # token ids
    ("axolotl", {"rl": "orpo", "orpo_alpha": 0.2, "datasets": [{"path": "d.jsonl", "type": "chat_template.argilla"}]}),
    ("axolotl", {"datasets": None, "pretraining_dataset": [{"path": "org/d", "type": "pretrain", "text_column": "t"}],
                 "max_steps": 5}),
    ("axolotl", {"unfrozen_parameters": ["model.layers.2[0-9]+.mlp", "model.norm", "^lm_head.weight$"]}),
    ("axolotl", {**LORA, "lora_target_modules": r"model.layers.[\d]+.mlp.up_proj",
                 "lora_target_parameters": ["experts.down_proj"]}),
    ("axolotl", {**LORA, "loraplus_lr_ratio": 16, "learning_rate": 2e-4}),
    ("factory", {"loraplus_lr_ratio": 4, "learning_rate": 1e-4}),
    ("factory", {"finetuning_type": "full", "deepspeed": None, "bf16": True, "dataset": "a,b", "val_size": 20}),
    ("factory", {"quantization_bit": 4, "lora_target": "q_proj,v_proj", "template": "qwen3", "enable_thinking": False}),
    ("factory", {"neat_packing": True, "cutoff_len": 512, "mask_history": True, "use_muon": True}),
    ("factory", {"mix_strategy": "interleave_under", "interleave_probs": "0.25,0.75", "dataset": "a,b"}),
    ("factory", {"lr_scheduler_type": "polynomial", "warmup_ratio": 0.1, "max_steps": 50, "eval_strategy": "steps",
                 "eval_steps": 0.2, "eval_dataset": "b", "save_strategy": "no"}),
    ("factory", {"finetuning_type": "freeze", "freeze_trainable_layers": -3, "freeze_extra_modules": "norm,lm_head"}),
    ("factory", {"stage": "ppo", "finetuning_type": "full", "reward_model": "r", "reward_model_type": "full"}),
    ("factory", {"use_bos_zero_training": True, "bos_scaling_factor": 0.2, "save_total_limit": 3}),
    ("trl", {**PEFT, "packing": True, "max_length": 256, "lora_target_modules": ["q_proj"], "dtype": "bfloat16"}),
    ("trl", {**PEFT, "max_length": None, "assistant_only_loss": True, "report_to": "wandb", "run_name": "n"}),
    ("trl", {**PEFT, "load_in_4bit": True, "use_bnb_nested_quant": True, "dtype": "bfloat16", "report_to": "none"}),
    ("trl", {"datasets": [{"path": "a/b", "split": "train[:50%]"}, {"path": "c/d", "name": "s"}], "fp16": True}),
    ("trl", {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_processes": 2,
             "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}),
)  # fmt: skip
COMMANDS = (
    "trl dpo --model_name_or_path m --dataset_name a/b --loss_type sigmoid sft --loss_weights 1.0 0.5",
    "trl kto --model_name_or_path m --dataset_name a/b --desirable_weight 0.7 --beta 0.2",
    "trl reward --model_name_or_path m --dataset_name a/b --center_rewards_coefficient 0.01",
    "python cpo.py --model_name_or_path m --dataset_name a/b --output_dir o --loss_type simpo --cpo_alpha 0.3",
    "python orpo.py --model_name_or_path m --dataset_name a/b --output_dir o --beta 0.2",
    "python gkd.py --model_name_or_path m --dataset_name a/b --output_dir o --teacher_model_name_or_path t --lmbda 1",
    "trl grpo --model_name_or_path m --dataset_name a/b --reward_funcs accuracy_reward think_format_reward "
    "--reward_weights 1 0.5 --loss_type cispo --epsilon_high 5 --scale_rewards batch --beta 0.01",
    "trl grpo --model_name_or_path m --dataset_name a/b --reward_funcs accuracy_reward --loss_type grpo "
    "--importance_sampling_level sequence --epsilon 0.003 --use_vllm --vllm_mode server",
    "trl rloo --model_name_or_path m --dataset_name a/b --reward_model_name_or_path org/r --num_generations 4",
)


def config_of(found: Translation | Mapping[str, Any]) -> RunConfig:
    return check_config(found.config if isinstance(found, Translation) else found, files=False)


def written(tool: str, config: RunConfig, given: set[str] | None = None, folder: str = "theirs") -> Written:
    return export(targets()[tool], config, given or set(), Ours(config, folder))


def again(tool: str, found: Written, folder: str = "theirs") -> Translation:
    """Translate what was written, from its own command."""
    files = {f"{folder}/{targets()[tool].file}": found.text} | {
        f"{folder}/{name}": text for name, text in found.files.items()
    }

    def read(path: str) -> str:
        if path in files:
            return files[path]
        raise InputError(Fault(path, "is not there"))

    words = shlex.split(found.command)
    devices = next((int(word.partition("=")[2]) for word in words if word.startswith("NPROC_PER_NODE=")), 1)
    return translate_command(words, Options(read=read, devices=devices))


def leaf_keys(group: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in group.items():
        if isinstance(value, dict) and path != "data.":
            yield from leaf_keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def alike(one: Any, other: Any) -> bool:
    """Whether two plain configs are equal, floats up to their last bits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-12)
    if isinstance(one, str) and isinstance(other, str) and one[:1].isdigit():
        return [pytest.approx(float(word)) if word[:1].isdigit() else word for word in one.split()] == [
            float(word) if word[:1].isdigit() else word for word in other.split()
        ]
    return one == other


def all_translations() -> list[tuple[str, Translation]]:
    found = [(name, translated(name)) for name in documented.EXPECTED]
    found += [(f"{tool} {number}", small(tool, **words)) for number, (tool, words) in enumerate(VARIATIONS)]
    found += [(text, translate_command(shlex.split(text), Options())) for text in COMMANDS]
    return [(name, one) for name, one in found if one.tool in TOOLS and one.command == "train"]


def test_every_translation_comes_back() -> None:
    """The same surefoot config, in full, after translate, export and translate again."""
    kept = 0
    for name, first in all_translations():
        tool = TOOLS[first.tool]
        found = written(tool, config_of(first))
        lost = [fate for fate in found.fates if fate.outcome in ("different", "lost")]
        assert not lost, (name, lost)
        assert alike(plain_config(config_of(again(tool, found))), plain_config(config_of(first))), name
        kept += 1
    assert kept >= 35


def test_twin_a_wrong_way_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = config_of(small("trl", learning_rate=1e-3))
    target = targets()["trl"]

    def doubled(ours: Ours) -> Any:
        return {
            method: {
                name: replace(row, back=lambda ours: 2e-3) if name == "learning_rate" else row
                for name, row in rows.items()
            }
            for method, rows in target.rows(ours).items()
        }

    found = export(replace(target, rows=doubled), first, set(), Ours(first, "theirs"))
    assert [(fate.key, fate.outcome, fate.there) for fate in found.fates] == [("optim.lr", "different", 2e-3)]


# Stages that a tool does not have. The GRPO recipe's reward is surefoot's own, which leaves TRL and Axolotl with none.
LACKING = {
    *((stage, tool) for stage in ("distill", "grpo") for tool in ("llamafactory", "axolotl")),
    ("grpo", "trl"),
    ("ppo", "trl"),
    ("ppo", "axolotl"),
}


@pytest.mark.parametrize("tool", TOOLS.values())
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_given_key_of_a_recipe_has_one_fate(path: Path, tool: str) -> None:
    """What is called carried is in the config that comes back; whatever differs from it is told."""
    text = expand_short_forms(parse_value(path.read_text(), ""))
    config, given = config_of(text), set(leaf_keys(text))
    if (config.stage, tool) in LACKING or (path.stem, tool) == ("sft-llama3-8b-tools-lora", "axolotl"):
        with pytest.raises(InputError):
            written(tool, config, given)
        return
    found = written(tool, config, given)
    fates = {fate.key: fate for fate in found.fates}
    assert len(fates) == len(found.fates)
    back = Ours(config_of(again(tool, found)), "theirs")
    ours = Ours(config, "theirs")
    for key in given - {"data.train", "data.eval", "data.format", "data.max_samples"}:
        if key.startswith(("data.train", "data.eval")):
            continue
        outcome = fates[key].outcome
        if outcome in ("carried", "changed"):
            assert alike(ours[key], back[key]), key
        else:
            assert not alike(ours[key], back[key]) or outcome == "lost", key


def test_settings_of_surefoot_alone_are_lost_also_at_their_default() -> None:
    config = config_of({"stage": "sft", "model": "m", "data": {"train": "org/d"}, "output": "o"})
    found = written("trl", config, {"guard.spikes", "kernels.loss", "optim.lr"})
    assert {fate.key for fate in found.fates if fate.outcome == "lost"} == {"guard.spikes", "kernels.loss"}
    assert {fate.key for fate in written("trl", config).fates if fate.outcome == "lost"} == set()


@pytest.mark.parametrize("tool", TOOLS.values())
def test_every_given_key_has_a_fate(tool: str) -> None:
    """Also one for all sources, and one without effect in this run."""
    data = {"train": "org/d", "format": "messages", "max_samples": 10}
    optim = {"warmup": 0.0, "warmup_from_zero": False}
    config = config_of({"stage": "sft", "model": "m", "data": data, "optim": optim, "output": "o"})
    given = {"data.format", "data.max_samples", "optim.warmup_from_zero", "data.train", "output"}
    found = written(tool, config, given)
    fates = {fate.key for fate in found.fates if fate.outcome in ("carried", "changed")}
    assert {
        "data.train.format",
        "data.train.max_samples",
        "optim.warmup_from_zero",
        "data.train.path",
        "output",
    } <= fates


def test_what_axolotl_demands() -> None:
    """Its schema refuses a config without two settings of the batch, and KTO that drops columns."""
    data = {"train": {"path": "org/d", "format": "judged"}, "template": "chatml"}
    one = config_of({"stage": "kto", "model": "m", "data": data, "batch": {"size": 2, "micro": 1}, "output": "o"})
    settings = parse_value(written("axolotl", one).text, "")
    assert (settings["micro_batch_size"], settings["gradient_accumulation_steps"]) == (1, 2)
    assert settings["remove_unused_columns"] is False
    other = config_of({"stage": "sft", "model": "m", "data": {"train": "org/d"}, "batch": {"size": 1}, "output": "o"})
    settings = parse_value(written("axolotl", other).text, "")
    assert (settings["micro_batch_size"], settings["gradient_accumulation_steps"]) == (1, 1)
    assert "remove_unused_columns" not in settings


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PAIRED = {"stage": "dpo", "model": "m", "data": {"train": "pairs.jsonl", "format": "preference"}, "output": "o"}


def pairs_for_axolotl(record: Mapping[str, Any]) -> tuple[dict[str, Any], Written]:
    """The entry of `datasets` for pairs like this record."""
    config = config_of(PAIRED)
    ours = Ours(config, "theirs", options=Options(first=lambda path: record))
    found = export(targets()["axolotl"], config, {"data.train"}, ours)
    return parse_value(found.text, "")["datasets"][0], found


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("chat_template.default", "prompt")),
        ({"messages": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]}, ("chat_template.default", None)),
        ({"chosen": TURNS, "rejected": TURNS}, ("chat_template.argilla_chat", None)),
    ],
)
def test_axolotl_is_told_where_the_prompt_of_a_pair_is(
    record: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    """chat_template.default reads `messages`, also a text; argilla_chat whole dialogues. Neither looks for `prompt`."""
    entry, found = pairs_for_axolotl(record)
    assert (entry["type"], entry.get("field_messages")) == expected
    assert not [fate for fate in found.fates if fate.key.startswith("data.train.") and fate.outcome != "carried"]


def test_twin_without_the_prompts_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axolotl_back, "_opening", lambda *arguments: None)
    entry, _ = pairs_for_axolotl({"prompt": "a", "chosen": "b", "rejected": "c"})
    assert "field_messages" not in entry


PICTURED = {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}
QLORA = {"adapter": {"kind": "lora"}, "precision": {"base": "nf4"}}
PPO: dict[str, Any] = {"stage": "ppo", "ppo": {"reward": "runs/r"}}


@pytest.mark.parametrize(
    ("tool", "keys", "record", "expected", "twin"),
    [
        ("axolotl", {"model": "Qwen/Qwen2.5-VL-7B-Instruct", "adapter": {"kind": "lora"}}, PICTURED, {
            "processor_type": "AutoProcessor", "skip_prepare_dataset": True, "remove_unused_columns": False,
            "freeze_mm_modules": True, "lora_target_linear": True}, {}),
        ("axolotl", {"model": "org/gemma-3-1b", "data.template": "gemma"}, {}, {"chat_template": "gemma3"},
         {"model": "org/gemma-2b"}),
        ("llamafactory", {"model": "org/gemma-3-1b", "data.template": "llamafactory-gemma"}, {}, {"template": "gemma3"},
         {"model": "org/gemma-2b"}),
        ("llamafactory", {"model": "Qwen/Qwen3-VL-8B"}, PICTURED, {"template": "qwen3_vl"}, {}),
        ("llamafactory", {"data.template": "llamafactory-qwen3"}, PICTURED, {"template": "qwen3_vl"}, {}),
        ("llamafactory", PPO, {}, {"reward_model_type": "full"}, {"adapter": {"kind": "lora"}}),
        ("llamafactory", {}, {}, {"report_to": "none"}, {"report_to": ["wandb"]}),
        ("trl", {}, {}, {"report_to": "none"}, {"report_to": ["wandb"]}),
        ("trl", QLORA, {}, {"dtype": "bfloat16"}, {"precision": {"base": "nf4", "compute": "fp16"}}),
    ],
)  # fmt: skip
def test_settings_that_decide_there_are_written(
    tool: str, keys: dict[str, Any], record: dict[str, Any], expected: dict[str, Any], twin: dict[str, Any]
) -> None:
    """Some have no counterpart here, or another word for the same. twin: these keys and no pictures, and all differ."""

    def settings(record: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        data = {"train": {"path": "org/d", "format": "messages"}, "template": keys.get("data.template", "auto")}
        plain = {"stage": "sft", "model": "org/m", "data": data, "output": "o", **keys, **more}
        config = config_of({name: value for name, value in plain.items() if "." not in name})
        ours = Ours(config, "theirs", options=Options(first=lambda path: record))
        return parse_value(export(targets()[tool], config, set(), ours).text, "")

    found, other = settings(record, {}), settings({}, twin)
    assert {name: found.get(name) for name in expected} == expected
    assert all(other.get(name) != value for name, value in expected.items() if name != "lora_target_linear")


def test_judged_answers_in_axolotl_have_a_template_of_their_own() -> None:
    """Its prompt_strategies.kto has chatml, llama3 and user-defined layouts, no chat_template."""
    data = {"train": {"path": "org/d", "format": "judged"}}
    config = config_of({"stage": "kto", "model": "m", "data": data, "output": "o"})
    found = written("axolotl", config)
    assert parse_value(found.text, "")["datasets"][0]["type"] == "chatml.prompt_pairs"
    assert ("data.template", "different", "chatml") in {(one.key, one.outcome, one.there) for one in found.fates}
    with pytest.raises(Refusal):
        read_layout("kto", {"type": "chat_template.default"})
    assert read_layout("dpo", {"type": "chat_template.default"}).template is None  # twin: another method has it


def test_axolotl_gets_no_pattern_that_begins_anywhere_and_says_so() -> None:
    plain = {"stage": "sft", "model": {"path": "m", "trained": [".*norm"]}, "data": {"train": "org/d"}, "output": "o"}
    fates = {one.key: one for one in written("axolotl", config_of(plain)).fates}
    assert (fates["model.trained"].outcome, bool(fates["model.trained"].why)) == ("different", True)
    twin = written("axolotl", config_of({**plain, "model": "m"}))
    assert "model.trained" not in {one.key for one in twin.fates}


def test_a_share_to_hold_out_means_the_same_in_trl() -> None:
    config = config_of({"stage": "sft", "model": "m", "data": {"train": "org/d", "eval": 0.05}, "output": "o"})
    fates = {fate.key: fate.outcome for fate in written("trl", config, {"data.eval"}).fates}
    assert fates["data.eval"] == "carried"
    mixture = {"datasets": [{"id": "a/b"}], "test_split_size": 0.2}
    twin = small("trl", dataset_mixture=mixture, test_split_size=0.05)  # where the mixture's share counts
    assert {note.outcome for note in twin.notes if note.word.startswith("test_split_size")} == {"listed"}


@pytest.mark.parametrize("reward", ["score.py:right", "http://127.0.0.1:1/score", "entry_point:right"])
def test_a_reward_that_is_no_model_is_not_written_as_one(reward: str) -> None:
    """LLaMA-Factory would read the name as a folder of an adapter."""
    plain = {"stage": "ppo", "model": "m", "data": {"train": "org/d"}, "output": "o", "ppo": {"reward": reward}}
    with raises_fault("SF-TRANSLATE-SETTING", "LLaMA-Factory", "reward_model"):
        written("llamafactory", config_of(plain))
    twin = written("llamafactory", config_of({**plain, "ppo": {"reward": "runs/r"}}))
    assert parse_value(twin.text, "")["reward_model"] == "runs/r"


@pytest.mark.parametrize(
    ("stage", "tool"), [("ppo", "trl"), ("ppo", "axolotl"), ("grpo", "llamafactory"), ("distill", "axolotl")]
)
def test_a_stage_that_the_tool_lacks(stage: str, tool: str) -> None:
    more = {"grpo": {"rewards": ["numeric"]}, "distill": {"teacher": "t"}, "ppo": {"reward": "runs/r"}}[stage]
    config = config_of({"stage": stage, "model": "m", "data": {"train": "org/d"}, "output": "o", stage: more})
    with raises_fault("SF-TRANSLATE-SETTING", "stage", stage):
        written(tool, config)


RECORDS: Mapping[str, dict[str, Any]] = {
    "alpaca": {"instruction": "say", "input": "it", "output": "no"},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "prompt-completion": {"prompt": "a", "completion": "b"},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "judged": {"prompt": "a", "completion": "b", "label": True},
}


@pytest.mark.parametrize("layout", RECORDS)
@pytest.mark.parametrize("renamed", [False, True])
def test_a_description_gives_the_same_records(
    layout: str, renamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dataset_info.json as surefoot itself reads it, beside the file without it."""
    monkeypatch.chdir(tmp_path)
    record = dict(RECORDS[layout])
    columns = {}
    if renamed and layout == "alpaca":
        columns = {"instruction": "question"}
        record["question"] = record.pop("instruction")
    Path("d.json").write_text(json.dumps([record]))
    stage = {"preference": "dpo", "judged": "kto"}.get(layout, "sft")
    source = {"path": "d.json", "format": layout, **({"columns": columns} if columns else {})}
    config = config_of({"stage": stage, "model": "m", "data": {"train": source}, "output": "o"})
    ours = Ours(config, ".", options=Options(first=lambda path: record))
    found = export(targets()["llamafactory"], config, set(), ours)
    for name, text in found.files.items():
        Path(name).write_text(text)
    kind = config.method.records
    plain = SourceSpec("d.json", format=layout, columns=columns, kind=kind)
    described = SourceSpec(".", name="d", kind=kind)
    (one,), (other,) = open_sources(plain), open_sources(described)
    fields = {"prompt": "instruction", "completion": "output", "kto_tag": "label"}
    values = [
        {fields.get(name, name): value for name, value in row.items()} for it in (one, other) for _, row in it.read()
    ]
    assert values[0] == values[1]


def test_a_template_in_the_config_becomes_a_file() -> None:
    text = "{% for message in messages %}{{ message.content }}{% endfor %}"
    data = {"train": {"path": "org/d", "format": "messages"}, "template": text}
    config = config_of({"stage": "sft", "model": "m", "data": data, "output": "o"})
    found = written("trl", config)
    assert found.files == {"chat_template.jinja": text}
    assert parse_value(found.text, "")["chat_template_path"] == "theirs/chat_template.jinja"
    assert "data.template" not in {fate.key for fate in found.fates}


def with_(**keys: Any) -> Ours:
    base = {"stage": "sft", "model": "m", "data": {"train": "org/d"}, "output": "o"}
    return Ours(config_of(base | keys), "theirs")


@pytest.mark.parametrize(
    ("size", "asked", "processes", "expected"),
    [
        (64, "auto", {}, (1, 64)),
        (64, 8, {}, (8, 8)),
        (12, 8, {}, (4, 3)),
        (64, 8, {"nproc": 2}, (8, 4)),
        (64, 8, {"nproc": 2, "machines": 2}, (8, 2)),
        (2, 1, {"nproc": 4}, (1, 1)),
    ],
)
def test_examples_of_a_pass(size: int, asked: Any, processes: Any, expected: tuple[int, int]) -> None:
    """By hand: passes x examples x processes is the batch, as far as it divides."""
    ours = with_(batch={"size": size, "micro": asked}, parallel=processes)
    assert (micro(ours), passes(ours)) == expected


def test_a_best_checkpoint_needs_evaluations_and_saves_together() -> None:
    """transformers refuses load_best_model_at_end otherwise."""
    data = {"train": "org/d", "eval": 0.1}
    for every, evaluated, kept in (("40 steps", "20 steps", True), ("30 steps", "20 steps", False)):
        assert keeps_best(with_(data=data, checkpoint={"every": every}, eval_every=evaluated)) is kept
    assert not keeps_best(with_(checkpoint={"every": "20 steps"}, eval_every=None))


def test_names_of_schedules() -> None:
    names = [
        schedule(with_(optim=optim))
        for optim in (
            {"schedule": "constant", "warmup": 0.0},
            {"schedule": "constant", "warmup": 0.1},
            {"schedule": "cosine", "floor": 0.1},
            {"schedule": "linear", "floor": 0.1},
        )
    ]
    assert names == ["constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial"]
    ours = with_(duration="4 epochs", checkpoint={"every": "0.5 epochs"})
    assert interval("checkpoint.every")(ours) == 0.125


def test_settings_that_the_translation_refuses_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        {"stage": "sft", "model": "m", "data": {"train": "org/d"}, "output": "o", "optim": {"schedule": "wsd"}}
    )
    found = written("llamafactory", config, {"optim.schedule"})
    fate = next(fate for fate in found.fates if fate.key == "optim.schedule")
    assert (fate.outcome, fate.value, fate.there) == ("different", "wsd", "linear")
    assert fate.why
    assert "lr_scheduler_type" not in parse_value(found.text, "")
    monkeypatch.setattr(way_back, "_mend", lambda *args: pytest.fail("refused"))
    with pytest.raises(pytest.fail.Exception):
        written("llamafactory", config)
