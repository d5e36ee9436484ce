"""A translated config of `trl grpo` or `trl rloo` learns as TRL does: same prompts, and from the same answers the same
losses and gradients.

`trl_grpo_runs.json` holds what TRL made of these configs on the same models; make_trl_grpo_runs.py says how.
"""

import io
import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import yaml

import surefoot
from equality import models
from helpers.tiers import representatives
from surefoot.commands.translate import reading_options
from surefoot.interop.registry import translate_command
from surefoot.models.rollout import EmbeddedRollouts, Rollout
from surefoot.training import step

HERE = Path(__file__).parent
REFERENCES = json.loads((HERE / "trl_grpo_runs.json").read_text())["runs"]
CLOSE = 2e-5  # relative to the largest: fp32 sums over some hundred tokens in another order, and one AdamW update


def translated(name, folder):
    words = yaml.safe_load((HERE / "trl_grpo" / f"{name}.yaml").read_text())
    base = folder / words["model_name_or_path"]
    words["model_name_or_path"] = str(base if base.is_dir() else models.build(base.name, folder))
    words["output_dir"] = str(folder / "runs" / name)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(words))
    verb = "rloo" if name.startswith("rloo") else "grpo"
    return translate_command(["trl", verb, "--config", str(path)], reading_options())


def told(gradient):
    flat = gradient.detach().double().flatten()
    return [float(flat.norm()), float(flat @ torch.arange(len(flat), dtype=torch.float64).cos())]


def run(config, reference, monkeypatch):
    """Train on TRL's answers; return losses, gradient norms, and the gradients of the first step."""
    waiting = defaultdict(list)
    for prompt, answer in zip(reference["prompts"], reference["completions"], strict=True):
        waiting[tuple(prompt)].append(tuple(answer))

    def answer(self, prompts, decoding, *others, **more):
        found = [waiting[tuple(prompt)].pop(0) for prompt in prompts]  # another prompt than TRL's: IndexError
        return [
            Rollout(tuple(prompt), one, one[-1] in decoding.stop_ids, None)
            for prompt, one in zip(prompts, found, strict=True)
        ]

    gradients = {}
    accumulate = step.accumulate_gradients

    def accumulated(engine, *arguments, **more):
        sums = accumulate(engine, *arguments, **more)
        if not gradients:
            named = engine.model.named_parameters()
            gradients.update({name: told(one.grad) for name, one in named if one.grad is not None})
        return sums

    monkeypatch.setattr(EmbeddedRollouts, "answer", answer)
    monkeypatch.setattr(step, "accumulate_gradients", accumulated)
    surefoot.train({**config, "log_every": 1}, stream=io.StringIO())
    log = (Path(config["output"]) / "trainer_log.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, log) if "loss" in row]
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows], gradients


def same(config, reference, monkeypatch):
    """Of TRL's rloo with masked answers the losses are more by a constant, of which there is no gradient."""
    losses, norms, gradients = run(config, reference, monkeypatch)
    if config["grpo"].get("loss") == "rloo" and config["grpo"].get("overlong") == "mask":
        losses = [one - losses[0] + reference["losses"][0] for one in losses]
    size = max(norm for norm, _ in reference["gradients"].values())
    theirs = {name: pytest.approx(one, rel=CLOSE, abs=CLOSE * size) for name, one in reference["gradients"].items()}
    first = losses[0] == pytest.approx(reference["losses"][0], abs=CLOSE)
    return (
        first
        and norms == pytest.approx(reference["grad_norms"], rel=CLOSE)
        and gradients == theirs
        and losses[1] == pytest.approx(reference["losses"][1], rel=CLOSE, abs=CLOSE)
    )


@pytest.mark.parametrize("name", REFERENCES)
def test_the_translated_run_learns_as_trl_does(name, folder, monkeypatch):
    monkeypatch.chdir(HERE)
    found = translated(name, folder)
    changed = [note.word for note in found.notes if note.outcome == "changed"]
    assert changed == (["mask_truncated_completions: true"] if name == "rloo-masked" else [])
    assert same(json.loads(json.dumps(found.config)), REFERENCES[name], monkeypatch)


CHANGES = [
    ("dapo", {"loss": "grpo"}),
    ("dapo", {"clip_high": 0.5}),
    ("grpo-kl", {"kl_by_ratio": False}),
    ("grpo-kl", {"temperature": 1.0}),
    ("grpo-kl", {"clip_high": 0.2}),
    ("grpo-lora", {"kl": 0.2}),
    ("grpo-lora", {"kl_by_ratio": True}),
    ("dr-grpo", {"scale": "group"}),
    ("dr-grpo", {"max_new_tokens": 91}),
    ("dapo-masked", {"overlong": "learn"}),
    ("bnpo", {"scale": "group"}),
    ("cispo", {"clip_high": 4.0}),
    ("gspo", {"loss": "grpo"}),
    ("gspo", {"clip_low": 0.2}),
    ("rloo", {"baseline": "group"}),
    ("rloo-masked", {"clip_low": 0.2, "clip_high": 0.2}),
]


@pytest.mark.parametrize(("name", "change"), representatives(CHANGES, CHANGES[2], CHANGES[9]))
def test_twin_another_setting_learns_otherwise(name, change, folder, monkeypatch):
    monkeypatch.chdir(HERE)
    config = json.loads(json.dumps(translated(name, folder).config))
    config["grpo"] |= change
    config["output"] += f"-{next(iter(change))}"
    assert not same(config, REFERENCES[name], monkeypatch)
