"""Name the rewards of TRL's trainers that answer prompts, for surefoot to call them: it imports their files."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GUARD = re.compile(r"^if __name__ == .__main__.", re.MULTILINE)
Fault = tuple[str, str, str]
"""A name, what is wrong with it, and what to do."""


def words_of(trainer: Any) -> tuple[dict[str, Any], list[Fault]]:
    """Return the settings of `trl grpo` that name the trainer's rewards, and those that have no name."""
    functions: list[str] = []
    words: dict[str, Any] = {"reward_funcs": functions}
    faults: list[Fault] = []
    for number, reward in enumerate(trainer.reward_funcs):
        if not hasattr(reward, "parameters"):
            name, what, fix = _function(reward)
            functions.append(name)
            faults += [(name, what, fix)] if what else []
        elif number:
            faults.append(("reward_funcs", "have a reward model behind another reward", "put the model first"))
        else:
            words["reward_model_name_or_path"] = str(reward.config._name_or_path)
    return words, faults


def _function(reward: Any) -> Fault:
    """Return the name by which the reward is found, and why it is not."""
    name, module = getattr(reward, "__qualname__", type(reward).__name__), getattr(reward, "__module__", "")
    if not inspect.isfunction(reward) or not name.isidentifier():
        return name, "is a reward that has no name in a file", "write it with def, outside of functions and classes"
    if module.startswith("trl."):
        return name, "", ""
    path = str(Path(inspect.getfile(reward)).resolve())
    if module == "__main__" and not _GUARD.search(Path(path).read_text()):
        what = "is a reward in the script, which trains as soon as it is imported"
        return name, what, 'put what trains under if __name__ == "__main__":, or the function into a file of its own'
    return f"{path}:{name}", "", ""


def what_else_answers(trainer: Any) -> Iterator[Fault]:
    """Yield what takes part in the answers besides the model."""
    for name in ("tools", "rollout_func", "environment_factories"):
        if getattr(trainer, name, None):
            yield name, "takes part in the answers", "use grpo.environment in surefoot's config"
    if {"image", "images"} & set(trainer.train_dataset.column_names):
        yield "train_dataset", "has pictures, which a take-over of this stage does not read", ""
