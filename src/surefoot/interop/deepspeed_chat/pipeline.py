"""Translate `e2e_rlhf.py` (formerly `train.py`) to the scripts that it starts, one per step.

    runs_of(["--actor-model", "1.3b", "--reward-model", "350m"])

Three runs do not fit one config, so `surefoot translate` names the three commands; compat's e2e_rlhf.py starts them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import command_error
from surefoot.interop.launch import Command, Options
from surefoot.interop.settings import Row, by_name, joint, text, whole
from surefoot.interop.tool import Tool
from surefoot.interop.translation import Translation
from surefoot.interop.words import read_only_flags

NAME = "e2e_rlhf.py"
_STEPS = {1: "step1_supervised_finetuning", 2: "step2_reward_model_finetuning", 3: "step3_rlhf_finetuning"}
ACTORS, REWARDS = ("1.3b", "llama_8b", "llama_8b_lora"), ("350m", "llama_8b")
_PUBLISHER = "facebook/opt-"  # the old version took hub ids


def _numbers(value: object) -> list[int]:
    return [whole(one) for one in (value if isinstance(value, list) else [value])]


ROWS: Mapping[str, Row] = by_name(
    joint("step", [1, 2, 3], (), "steps to run", type=_numbers),
    joint("actor_model", "1.3b", (), f"{', '.join(ACTORS)}: the scripts that compat has", type=text),
    joint("reward_model", "350m", (), f"{', '.join(REWARDS)}: the scripts that compat has", type=text),
    joint("actor_zero_stage", None, (), "default: set by the script", type=whole),
    joint("reward_zero_stage", None, (), "default: set by the script", type=whole),
    joint("output_dir", "./output", (), "contains actor-models, reward-models and step3-models", type=text),
    joint("deployment_type", "single_node", (), "single_gpu or single_node", type=text),
    joint("num_gpus", None, (), "older form of deployment_type: 1 or 8", type=whole),
)


@dataclass(frozen=True)
class Run:
    """step: 1, 2 or 3. script: path below compat/deepspeed_chat. needs: folders of the models that it starts from.
    environment: variables that the script reads."""

    step: int
    script: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def runs_of(words: Sequence[str]) -> list[Run]:
    """Return the runs that the flags ask for. Raises InputError with every fault."""
    flags = read_only_flags(words, lists=("step",))
    draft = Draft(Dialect(NAME, ROWS, ()), flags)
    actor, reward = (str(draft[f"{name}_model"]).removeprefix(_PUBLISHER) for name in ("actor", "reward"))
    for name, size, known in (("actor_model", actor, ACTORS), ("reward_model", reward, REWARDS)):
        if size not in known:
            fix = f"use {', '.join(known)}, or your own config (surefoot migrate)"
            draft.refuse(name, f"compat has no script for {size}", fix)
    if draft["deployment_type"] not in ("single_gpu", "single_node") or draft["num_gpus"] not in (None, 1, 8):
        draft.refuse("deployment_type", "compat's scripts start on one machine", "use single_gpu or single_node")
    if wrong := [step for step in draft["step"] if step not in _STEPS]:
        draft.refuse("step", f"there is no step {wrong[0]}", "use 1, 2 and 3")
    for name in ROWS:
        draft.note(name, "carried")
    draft.finish("")
    stages = tuple("" if (stage := draft[name]) is None else str(stage) for name in ("actor_zero_stage",
                   "reward_zero_stage"))  # fmt: skip
    output = str(draft["output_dir"]).rstrip("/")
    places = {1: f"{output}/actor-models/{actor}", 2: f"{output}/reward-models/{reward}"}
    rlhf = f"{output}/step3-models/{actor}"
    single = {"NUM_GPUS": "1"} if draft["deployment_type"] == "single_gpu" or draft["num_gpus"] == 1 else {}
    last = actor.removesuffix("_lora")
    runs = {
        1: Run(1, _script(1, actor), (places[1], stages[0]), (), single),
        2: Run(2, _script(2, reward), (places[2], stages[1]), (), single),
        3: Run(3, _script(3, last), (places[1], places[2], *stages, rlhf), (places[1], places[2]), single),
    }
    return [runs[step] for step in sorted(set(draft["step"]))]


def _script(step: int, size: str) -> str:
    return f"training/{_STEPS[step]}/training_scripts/single_node/run_{size}.sh"


def claims(command: Command) -> bool:
    return command.name == NAME


def from_command(command: Command, options: Options) -> Translation:
    """Raise an error that names the three commands."""
    lines = [shlex.join(["bash", run.script, *run.arguments]) for run in runs_of(command.arguments)]
    what = "starts several runs, and surefoot translates one at a time"
    raise command_error(command.program, what, f"use compat/deepspeed_chat/{NAME}, or its runs: {'; '.join(lines)}")


PIPELINE = Tool(f"DeepSpeed-Chat {NAME}", claims, from_command, rows=ROWS)
