"""What the forecast says of rows that nobody reads, against what autograd really does not keep."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from helpers.architectures import TINY, build
from helpers.model_layouts import model_facts
from helpers.plans import adapter_plan, linear_names
from surefoot.data.batching.batch import Batch
from surefoot.models.adapters import add_adapter
from surefoot.models.fast.adapters import adapter_path
from surefoot.models.fast.last_block import last_block_path
from surefoot.models.forward import hidden_at
from surefoot.planning.memory import unread_bytes
from surefoot.planning.workload import Workload

MORE = 1.35  # adapters' A x, a norm's copy under autocast and inputs of other types are not counted
ROWS, TOKENS, READ = 4, 64, 16


def kept(model, places, autocast) -> int:
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 60
    batch = Batch(ids, ids, None, 1, (TOKENS,) * ROWS, tuple(range(ROWS)))
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    seen = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        found = hidden_at(model, batch, places)
    del found
    return sum(storage.nbytes() for storage in seen.values())


def test_unread_rows_are_what_autograd_does_not_keep(tmp_path):
    for family in ["llama", "qwen2"]:
        for kind, autocast in [("full", False), ("lora", False), ("lora", True)]:
            config = TINY[family] | {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
            facts = model_facts(tmp_path, config)
            model: Any = build(config | {"use_cache": False}, device="cpu")
            if autocast:
                model = model.bfloat16()
            if kind == "lora":
                model = add_adapter(model, adapter_plan(linear_names(model)), seed=1, base="base", autocast=autocast)
                adapter_path().install(model)
            model.train()
            places = torch.arange(READ) * 3
            plain = kept(model, places, autocast)
            last_block_path().install(model)
            saved = plain - kept(model, places, autocast)
            fused = {"fused_norms": False, "fused_gates": False}
            work = cast(Workload, SimpleNamespace(model=facts, width=2 if autocast else 4, **fused))
            said = unread_bytes(work, ROWS * TOKENS - READ)
            assert said <= saved <= MORE * said
            assert not said <= saved / 2 <= MORE * said  # twin: half of it
