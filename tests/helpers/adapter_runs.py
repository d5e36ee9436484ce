"""Adapter folders as a run leaves them, with the plan that records how they were trained; written in milliseconds."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from helpers.plans import adapter_plan, choice, linear_names, run_plan
from surefoot.models.adapters import add_adapter
from surefoot.models.load import load_model
from surefoot.models.save import save_adapter
from surefoot.planning.plan import RunPlan, plan_to_json

CPU = torch.device("cpu")


def a_plan(template: str = "tokenizer", stop: tuple[int, ...] = (321,), bos: bool = True) -> RunPlan:
    plan = run_plan(trainable=0, parameters=0)
    tokens = replace(plan.tokenizer, template=choice(template), stop=choice(stop), bos=choice(bos))
    return replace(plan, tokenizer=tokens)


def a_run(folder: Path, base: Path, plan: RunPlan | None = None, rows: int | None = None, named: str = "") -> Path:
    """Write an adapter with non-zero B.

    plan: the plan that it was trained with; None writes none.
    rows: rows of the embedding, which is then saved, too.
    named: the base's name in adapter_config.json.
    """
    model = load_model(base, dtype=torch.float32, attention_implementation="sdpa", device=CPU, vocab_rows=rows)
    adapted = add_adapter(model, adapter_plan(linear_names(model)), seed=1, base=named or str(base))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    save_adapter(adapted, folder, save_embedding=rows is not None)
    if plan:
        (folder / "plan.json").write_text(json.dumps({"plan": plan_to_json(plan)}))
    return folder
