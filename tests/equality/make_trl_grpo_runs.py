"""Write trl_grpo_runs.json: what TRL's GRPO and RLOO trainers make of each config in trl_grpo/, from the YAML to the
gradients of the first step.

Translations of these configs are held against it. Run by hand in this folder, with the interpreter of an environment
that has TRL (1.16 when this was last done, with surefoot's versions of torch, transformers and peft), on models written
by surefoot's environment:

    PYTHONPATH=tests .venv/bin/python -m equality.models MODELS
    cd tests/equality && OTHER/bin/python make_trl_grpo_runs.py MODELS

Every config answers all prompts once and takes two steps over these answers. Per config: ids of each prompt and of its
answers as TRL drew them, loss and gradient norm of both steps, and of each parameter's gradient in the first step
its norm and its product with a fixed vector.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from trl import GRPOTrainer, RLOOTrainer
from trl.scripts import grpo, rloo

HERE = Path(__file__).parent
RUN = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
RUN |= {"gradient_checkpointing": False}  # in training mode too, where a reference is computed within the step


def told(gradient: torch.Tensor) -> list[float]:
    """Norm, and product with cos(0), cos(1), …"""
    flat = gradient.detach().double().flatten()
    return [float(flat.norm()), float(flat @ torch.arange(len(flat), dtype=torch.float64).cos())]


class Recorded:
    """The trainer logs rounded losses. What each of its micro-steps returns is that part of the step's loss."""

    made: Recorded

    def __init__(self, *arguments: Any, **more: Any):
        Recorded.made = self
        self.micro_losses: list[float] = []
        self.answers: dict[str, Any] = {}
        self.gradients: dict[str, list[float]] = {}
        super().__init__(*arguments, **more)

    def training_step(self, *arguments: Any, **more: Any) -> Any:
        loss = super().training_step(*arguments, **more)
        self.micro_losses.append(float(loss))
        if len(self.micro_losses) == self.args.gradient_accumulation_steps:
            named = self.model.named_parameters()
            self.gradients = {name: told(one.grad) for name, one in named if one.grad is not None}
        return loss

    def _generate(self, prompts: Any, *more: Any) -> Any:
        found = super()._generate(prompts, *more)
        self.answers = {"prompts": found[0], "completions": found[1]}
        return found


class RecordedGrpo(Recorded, GRPOTrainer):
    pass


class RecordedRloo(Recorded, RLOOTrainer):
    pass


def reference(config: Path, models: Path) -> dict[str, Any]:
    words = yaml.safe_load(config.read_text()) | RUN
    words["model_name_or_path"] = str(models / words["model_name_or_path"])
    script = rloo if config.stem.startswith("rloo") else grpo
    with tempfile.TemporaryDirectory() as output:
        path = Path(output) / "run.yaml"
        path.write_text(yaml.safe_dump(words | {"output_dir": output}))
        parsed = script.make_parser().parse_args_and_config(["--config", str(path)])
        script.main(*parsed)  # as `trl grpo --config` does
    trainer: Any = Recorded.made
    steps = [row for row in trainer.state.log_history if "grad_norm" in row]
    passes = trainer.args.gradient_accumulation_steps
    losses = [sum(trainer.micro_losses[at * passes : (at + 1) * passes]) for at in range(len(steps))]
    norms = [row["grad_norm"] for row in steps]
    return {**trainer.answers, "losses": losses, "grad_norms": norms, "gradients": trainer.gradients}


if __name__ == "__main__":
    import trl

    trl.GRPOTrainer, trl.RLOOTrainer = RecordedGrpo, RecordedRloo  # the scripts import them when they run
    found = {
        "versions": {name: version(name) for name in ("trl", "torch", "transformers")},
        "runs": {path.stem: reference(path, Path(sys.argv[1])) for path in sorted((HERE / "trl_grpo").glob("*.yaml"))},
    }
    (HERE / "trl_grpo_runs.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
