"""Translate DeepSpeed-Chat's three steps and its DPO: `deepspeed main.py …` in a step's folder, or by its path.

    deepspeed training/step1_supervised_finetuning/main.py --model_name_or_path facebook/opt-1.3b --zero_stage 2

Every step's program is called `main.py`. The folder tells which it is, else a flag that only one step has.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from surefoot.interop.deepspeed_chat import rules
from surefoot.interop.deepspeed_chat.data import data_rule
from surefoot.interop.deepspeed_chat.log_lines import log_lines
from surefoot.interop.deepspeed_chat.pipeline import PIPELINE
from surefoot.interop.deepspeed_chat.rows import ALIASES, LISTS, STEPS, Step
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import command_error
from surefoot.interop.launch import Command, Options
from surefoot.interop.settings import switches
from surefoot.interop.tool import Tool
from surefoot.interop.trainer import set_size
from surefoot.interop.translation import Translation
from surefoot.interop.words import read_only_flags

NAME = "DeepSpeed-Chat"
FOLDERS: Mapping[Step, str] = {
    "sft": "step1_supervised_finetuning",
    "reward": "step2_reward_model_finetuning",
    "dpo": "step2_dpo_finetuning",
    "ppo": "step3_rlhf_finetuning",
}
TITLES: Mapping[Step, str] = {"sft": "step 1", "reward": "step 2", "dpo": "step 2 with DPO", "ppo": "step 3"}
_OWN: Mapping[Step, tuple[str, ...]] = {  # flags that no other step has
    "ppo": ("--actor_model_name_or_path", "--critic_model_name_or_path"),
    "dpo": ("--beta", "--label_smoothing"),
    "reward": ("--num_padding_at_beginning", "--eval_interval", "--eval_iters"),
    "sft": ("--sft_only_data_path", "--print_loss", "--eot_token"),
}
_ANY = ("--data_split", "--zero_stage", "--data_output_path", "--max_seq_len", "--only_optimize_lora", "--lora_dim")
_ONE_MODEL = (
    set_size,
    rules.set_length,
    rules.set_adapter,
    partial(rules.set_dropouts, shares=("dropout",), switches=("disable_dropout",)),
    rules.set_checkpointing,
    rules.set_evaluation,
    lambda draft: rules.set_zero(draft, "zero_stage"),
    *rules.COMMON,
    rules.set_output(),
)
_RULES = {
    "sft": (rules.set_stage("sft"), *_ONE_MODEL),
    "reward": (rules.set_stage("reward"), rules.set_padding, *_ONE_MODEL),
    "dpo": (rules.set_stage("dpo"), *_ONE_MODEL),
    "ppo": rules.PPO_RULES,
}


def step_of(command: Command) -> Step | None:
    """Return the step of a `main.py`; None if neither folder nor flags tell, and for other programs."""
    if command.name != "main.py":
        return None
    for place in (command.program, command.folder):
        for step, folder in FOLDERS.items():
            if folder in place.split("/"):
                return step
    flags = _flags(command)
    return next((step for step, own in _OWN.items() if flags & set(own)), None)


def _flags(command: Command) -> set[str]:
    return {word.partition("=")[0] for word in command.arguments}


def _claims(step: Step, command: Command) -> bool:
    return step_of(command) == step


def _from_command(step: Step, command: Command, options: Options) -> Translation:
    words = read_only_flags(command.arguments, switches=switches(STEPS[step]), lists=LISTS)
    name = f"{NAME} {TITLES[step]}"
    dialect = Dialect(name, STEPS[step], (data_rule(step), *_RULES[step]), ALIASES[step])
    return Draft(dialect, words, command, options).finish("train")


def _claims_unknown(command: Command) -> bool:
    return command.name == "main.py" and bool(_flags(command) & set(_ANY))


def _from_unknown(command: Command, options: Options) -> Translation:
    fix = f"start it in the step's folder, or give its path: training/{FOLDERS['sft']}/main.py"
    raise command_error(command.program, "could be DeepSpeed-Chat's step 1 or step 2", fix)


TOOLS = (
    *(
        Tool(
            name=f"{NAME} {TITLES[step]}",
            claims_command=partial(_claims, step),
            from_command=partial(_from_command, step),
            log=partial(log_lines, step),
            rows=STEPS[step],
        )
        for step in FOLDERS
    ),
    PIPELINE,
    Tool(NAME, _claims_unknown, _from_unknown),
)
