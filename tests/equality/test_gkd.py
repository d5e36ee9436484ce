"""A translated config of TRL's GKD learns the tokens that its collator for conversations marks. Its loss is compared in
test_trl_distill.py."""

import json
import shlex

import pytest
from transformers import AutoTokenizer

from equality import models
from equality.ours import run_until_step_1
from helpers.faults import refused_settings
from surefoot.commands.translate import reading_options
from surefoot.config.load import check_config
from surefoot.interop.registry import translate_command

ROWS = [
    [("user", "Say a."), ("assistant", "a")],
    [
        ("system", "Be brief."),
        ("user", "Say b."),
        ("assistant", "b"),
        ("user", "And c?"),
        ("assistant", "c of course"),
    ],
]


def collated(tokenizer) -> list[dict[str, list[int]]]:
    """What DataCollatorForChatML makes of the conversations: everything behind the last prompt is learned."""
    found = []
    for row in ROWS:
        messages = [{"role": role, "content": content} for role, content in row]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        prompt = len(tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False))
        found.append({"ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


@pytest.fixture
def flags(folder, tmp_path):
    base = models.build("qwen2", folder)
    rows = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    given = {"model_name_or_path": base, "teacher_model_name_or_path": base, "dataset_name": tmp_path / "rows.jsonl"}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + ["--output_dir", "o"]


def translated(flags, more=""):
    return translate_command(["python", "gkd.py", *flags, *shlex.split(more)], reading_options())


def test_the_last_message_is_learned(flags):
    config = json.loads(json.dumps(translated(flags, "--lmbda 0 --bf16 false --max_length 128").config))
    expected = collated(AutoTokenizer.from_pretrained(flags[1]))
    ours = run_until_step_1(config, step=False).examples
    assert [row["ids"] for row in ours] == [row["ids"] for row in expected]
    # Behind the end of the answer the template writes a line break, which only GKD learns.
    assert [row["labels"] for row in ours] == [[*row["labels"][:-1], -100] for row in expected]
    config["data"]["train_on"] = "responses"
    assert run_until_step_1(config, step=False).examples != ours  # the twin


def test_settings_have_their_places(flags):
    config = translated(flags, "--beta 0.1 --temperature 0.7 --max_new_tokens 32 --seq_kd false").config
    checked = check_config(config, files=False)
    assert checked.stage == "distill"
    said = checked.distill
    assert (said.beta, said.sampling_temperature, said.max_new_tokens, said.on_policy) == (0.1, 0.7, 32, 0.5)
    assert (said.temperature, said.sft) == (1.0, 0.0)


@pytest.mark.parametrize("name", ["--seq_kd", "--teacher_model_init_kwargs {a:1}"])
def test_what_a_teacher_cannot_be_told(flags, name):
    assert refused_settings(lambda: translated(flags, name)) == [name.split()[0].lstrip("-")]


def test_without_a_teacher(flags):
    assert refused_settings(lambda: translated([*flags[:2], *flags[4:]])) == ["teacher_model_name_or_path"]
