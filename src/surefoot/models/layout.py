"""A model or adapter folder in another layout than transformers': recognised by its names, read through rules.

What transformers reads by itself (a backbone without its prefix, tables from older versions) is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from surefoot.models.convert.recognise import Recognised, recognise
from surefoot.models.convert.safetensors_file import StoredTensor, unread
from surefoot.models.convert.target import Target
from surefoot.models.quiet import quiet_libraries
from surefoot.models.tree import facts_of
from surefoot.system.errors import InputError

_LEFT_TO_TRANSFORMERS = frozenset({"backbone", "buffers"})


def expected_tensors(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight that transformers saves for this config, a tied head too. Takes no memory."""
    with quiet_libraries(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def other_layout(stored: dict[str, StoredTensor], config: PreTrainedConfig, folder: Path) -> Recognised | None:
    """The rules to read these files by; None where transformers reads them as they are, or says what is wrong.

    Raises InputError where a layout is recognised and weights are missing, surplus or ill-shaped nevertheless.
    """
    expected = expected_tensors(config)
    if all(expected.get(name) == tensor.shape for name, tensor in stored.items()):
        return None
    facts = replace(facts_of(folder), tied=bool(config.get_text_config().tie_word_embeddings))
    found = recognise(unread(stored), Target(expected, facts), str(folder))
    if set(found.layouts) <= _LEFT_TO_TRANSFORMERS:
        if any(name.endswith("attn.bias") for name in found.tensors.keys() - expected.keys()):
            raise InputError(found.faults)  # transformers would drop it in silence, as if it were a mask
        return None
    if found.faults:
        raise InputError(found.faults)
    return found


def said(folder: Path, layouts: Sequence[str], *, value_head: bool = False) -> str:
    """One sentence for the user."""
    head = "; its value head is not part of the model" if value_head else ""
    return f"{folder} is in another layout ({', '.join(layouts)}) and is read through rules{head}"
