"""Every method on two processes through the command line: what one process loses and learns, two do.

The ranks are forked, to save their imports; test_ranks.py starts them as people do.

`-o junit_family=xunit1 --junitxml FILE` keeps the largest differences that were found, as properties of the tests;
docs/evidence/engines.md has them.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from distributed.runs import rows
from helpers.fork_server import ForkServer
from helpers.seeing import seeing
from helpers.seeing_families import seeing_family
from helpers.tiers import representatives
from helpers.tiny_models import curt, tiny_judge, tiny_llama
from runs.test_pictures_run import records as pictures

# fp32 sums over ranks and shares are taken in another order. Measured: losses 5e-7 (of PPO), weights 4e-8, after steps
# of 3e-3.
LOSS_TOLERANCE = 5e-6
WEIGHT_TOLERANCE = 1e-6
ENGINES = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "zero2": {"engine": "deepspeed", "zero_stage": 2},
    "zero3": {"engine": "deepspeed", "zero_stage": 3},
}
WHOLE = ("ddp", "zero2")  # each rank has all weights, so it takes the paths of one process
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": {"kind": "lora", "rank": 4, "alpha": 8}},
    "dora": {"adapter": {"kind": "dora", "rank": 4, "alpha": 8}},
    "full": {},
}
UNEVEN = {"batch": {"size": 3, "micro": 1}}  # one of two ranks has a blank micro-batch
PAIRS = {"data": {"train": "WORLD/pairs.jsonl", "max_length": 64}, **UNEVEN}
METHODS: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft", "data": {"train": "WORLD/asked.jsonl", "max_length": 64}, **UNEVEN},
    "reward": {"stage": "reward", **PAIRS},
    "dpo": {"stage": "dpo", "alignment": {"reference": "cached"}, **PAIRS},
    "kto": {"stage": "kto", "data": {"train": "WORLD/judged.jsonl", "max_length": 64}, **UNEVEN},
    "ppo": {
        "stage": "ppo",
        "data": {"train": "WORLD/prompts.jsonl", "max_length": 64},
        "batch": {"size": 4, "micro": 1},
        "ppo": {
            "reward": "WORLD/score.py:vowels",
            "max_new_tokens": 6,
            "unsup_coef": 1.0,
            "unsup_data": "WORLD/texts.jsonl",  # 5: the second step has one text for its 4 micro-batches
        },
    },
}
METHODS["grpo"] = {
    "stage": "grpo",
    "data": METHODS["ppo"]["data"],
    "batch": {"size": 6, "micro": 1},  # three prompts: one rank answers more than the other
    "grpo": {
        "rewards": ["WORLD/score.py:vowels"],
        "group": 2,
        "max_new_tokens": 6,
        "kl": 0.1,
        "top_p": 0.9,
        "epochs": 2,
    },
    "duration": "3 steps",  # at the first ratio is 1 and the loss is rounding; the third begins another rollout
}
METHODS["distill"] = {
    "stage": "distill",
    "data": METHODS["sft"]["data"],
    "distill": {"teacher": "WORLD/teacher", "beta": 0.5, "sft": 0.1},
    **UNEVEN,
}
METHODS["grpo-turns"] = {
    **METHODS["grpo"],
    "model": "WORLD/curt",
    "data": {"train": "WORLD/prompts.jsonl", "max_length": 96},
    "grpo": {**METHODS["grpo"]["grpo"], "max_new_tokens": 40, "environment": "WORLD/tool.py:Counter"},
}
METHODS["distill-own"] = {
    **METHODS["distill"],
    "distill": {"teacher": "WORLD/teacher", "beta": 1.0, "on_policy": 0.5, "max_new_tokens": 6},
}
METHODS["sft-dft"] = {**METHODS["sft"], "sft": {"loss": "dft"}}
METHODS["sft-seen"] = {
    **METHODS["sft"],
    "model": "WORLD/gemma3",
    "data": {"train": "WORLD/seen-2.jsonl", "max_length": 512},  # texts stand between pictures
    "vision": {"tower": "trained", "projector": "trained"},
    "optim": {"lr": 1.0e-3, "eps": 1.0e-4},  # one gradient is about as large as eps, whose step follows rounding most
}
for stage in ("reward", "kto"):  # a step has prompts with and without pictures
    METHODS[f"{stage}-seen"] = {
        **METHODS["sft-seen"],
        "stage": stage,
        "data": {"train": f"WORLD/seen-{stage}.jsonl", "eval": 2, "max_length": 512},
    }
METHODS["grpo-seen"] = {
    **METHODS["grpo"],
    "model": "WORLD/gemma3",
    # Greedily one rank answers prompts with pictures alone, and the other none.
    "data": {"train": "WORLD/seen-grpo.jsonl", "eval": "WORLD/seen-grpo-eval.jsonl", "max_length": 512},
}
# Critic and reward model over a base of their own, which they share where the critic is an adapter. Three prompts: a
# rank has a blank batch where answers are scored.
METHODS["ppo-judged"] = {
    **METHODS["ppo"],
    **UNEVEN,
    "ppo": {"reward": "WORLD/judge", "critic_lr": 3.0e-4, "max_new_tokens": 6},
}
# The critic is a model of its own, whose output head does not train.
METHODS["ppo-whole"] = {**METHODS["ppo-judged"], "ppo": {**METHODS["ppo-judged"]["ppo"], "critic_adapter": "none"}}
SCORE = """
def vowels(prompts, responses):
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]
"""
TOOL = """
class Counter:
    def reset(self, record):
        return record["prompt"][:3]

    def step(self, answer):
        return {"observation": str(len(answer)), "reward": len(answer) % 3, "done": len(answer) % 4 == 0}
"""
# The other preference methods go over the same code as the packed answers below.
MATRIX = representatives(
    product(METHODS, ENGINES, ADAPTERS),
    ("ppo-judged", "fsdp2", "lora"),
    ("grpo", "fsdp2", "lora"),
    ("distill", "fsdp2", "full"),
    ("sft-seen", "fsdp2", "full"),
    ("grpo-turns", "ddp", "lora"),
    ("distill-own", "ddp", "lora"),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("methods")
    tiny_llama(folder / "base")
    tiny_judge(folder / "judge", seed=1, layers=3)
    tiny_llama(folder / "teacher", seed=2, layers=3)
    words = ("one", "two", "heron", "sky", "trout", "answer")
    prompts = [{"prompt": f"Say {word} {number} times."} for number, word in enumerate(words)]
    answers = [" ".join([word] * (1 + number % 3)) for number, word in enumerate(words)]
    tables = {
        "prompts": prompts,
        "asked": [
            {"instruction": one["prompt"], "input": "", "output": answer}
            for one, answer in zip(prompts, answers, strict=True)
        ],
        "pairs": [
            {**one, "chosen": answers[number], "rejected": words[number - 1]} for number, one in enumerate(prompts)
        ],
        "long": [
            {"prompt": one["prompt"] * 4, "chosen": answers[number], "rejected": words[number - 1]}
            for number, one in enumerate(prompts)
        ],
        "judged": [
            {**one, "completion": answers[number], "label": number % 2 == 0} for number, one in enumerate(prompts)
        ],
        "texts": [{"text": f"The {word} is here."} for word in words[:5]],
    }
    seen = [json.loads(line) for line in pictures(folder).read_text().splitlines()]
    said = [{"role": "user", "content": "Say one."}, {"role": "assistant", "content": "one"}]
    for texts in (2, 4):
        tables[f"seen-{texts}"] = [*seen[:2], *[{"messages": said}] * texts, *seen[2:]]
    mixed = [
        (one["messages"][:1], one["messages"][1]["content"], words[place % 4])
        for place, one in enumerate(tables["seen-2"])
    ]
    tables["seen-reward"] = [{"prompt": asked, "chosen": said, "rejected": other} for asked, said, other in mixed]
    tables["seen-kto"] = [
        {"prompt": asked, "completion": said, "label": place % 2 == 0} for place, (asked, said, _) in enumerate(mixed)
    ]
    tables["seen-grpo"] = [{"prompt": asked} for asked, _, _ in mixed]
    first, second, blind = (tables["seen-grpo"][place] for place in (0, 1, 2))
    tables["seen-grpo-eval"] = [first, blind, second, blind]
    for name, records in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "score.py").write_text(SCORE)
    (folder / "tool.py").write_text(TOOL)
    curt(folder / "curt")
    seeing_family("gemma3", folder / "gemma3")
    return folder


@dataclass(frozen=True)
class Trained:
    """losses: of all steps. weights: all that the run wrote, by file and name. answers: lines of answers.jsonl. paths:
    fast paths of each rank, each with whether it was used."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    answers: list[str]
    paths: set[tuple[str, bool]]


def trained(
    server: ForkServer,
    world: Path,
    name: str,
    method: str,
    adapter: str,
    parallel: dict[str, Any] | None = None,
    **changes: Any,
) -> Trained:
    """In two ranks where `parallel` says how."""
    output = world / name
    config = {
        "model": "WORLD/base",
        **ADAPTERS[adapter],
        # Of a gradient that is hardly more than rounding Adam would make a whole step; below eps it makes none.
        "optim": {"lr": 3.0e-3, "eps": 1.0e-4},
        "precision": "fp32",
        "duration": "2 steps",
        "output": str(output),
        **({"parallel": parallel} if parallel else {}),
        **METHODS[method],
        **changes,
    }
    path = world / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config).replace("WORLD", str(world)))
    log = world / f"{name}.txt"
    code = server.run(["train", str(path)], log, ranks=2 if parallel else 1)
    said = log.read_text()
    assert code == 0, said
    assert "UserWarning" not in said, said
    found = {
        f"{file.relative_to(output)}: {key}": tensor
        for file in sorted(output.rglob("*.safetensors"))
        if not file.relative_to(output).parts[0].startswith("checkpoint-")
        for key, tensor in load_file(file).items()
    }
    kept = output / "answers.jsonl"
    answers = kept.read_text().splitlines() if kept.exists() else []
    ranks = json.loads((output / "environment.json").read_text())["ranks"]
    paths = {(name, path["used"]) for rank in ranks for name, path in rank.get("fast_paths", {}).items()}
    return Trained([row["loss"] for row in rows(output) if "loss" in row], found, answers, paths)


@pytest.fixture(scope="module")
def alone(server, world) -> Callable[[str, str], Trained]:
    known: dict[tuple[str, str], Trained] = {}

    def found(method: str, adapter: str) -> Trained:
        if (method, adapter) not in known:
            known[method, adapter] = trained(server, world, f"{method}-{adapter}-alone", method, adapter)
        return known[method, adapter]

    return found


def apart(one: Trained, other: Trained) -> tuple[float, float]:
    """The largest difference of losses, and that of weights."""
    assert len(one.losses) == len(other.losses) >= 2
    assert one.weights.keys() == other.weights.keys()
    losses = max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
    return losses, max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


@pytest.mark.parametrize(("method", "engine", "adapter"), MATRIX)
def test_two_ranks_do_what_one_does(server, world, alone, method, engine, adapter, record_property):
    name = f"{method}-{engine}-{adapter}"
    single, both = alone(method, adapter), trained(server, world, name, method, adapter, ENGINES[engine])
    losses, weights = apart(single, both)
    assert both.answers == single.answers  # every rank's, in one order
    assert (len(both.answers) > 0) == method.startswith("grpo")
    for key, value in {"cell": name, "losses": losses, "weights": weights}.items():
        record_property(key, value)
    assert losses <= LOSS_TOLERANCE
    assert weights <= WEIGHT_TOLERANCE
    if engine in WHOLE:
        assert both.paths == single.paths
        assert all(used for _, used in both.paths)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_twin_another_order_of_examples_is_seen(server, world, alone, method):
    losses, weights = apart(alone(method, "lora"), trained(server, world, f"{method}-other", method, "lora", seed=7))
    assert losses > LOSS_TOLERANCE
    assert weights > WEIGHT_TOLERANCE


@pytest.mark.parametrize("engine", representatives(WHOLE, "zero2"))
def test_two_ranks_learn_from_packed_answers_what_one_learns_from_padded_ones(server, world, engine):
    data = {**METHODS["kto"]["data"], "eval": 2}
    packed, padded = ({"data": {**data, "packing": packing}} for packing in ("on", "off"))
    alone = trained(server, world, f"kto-padded-{engine}", "kto", "lora", **padded)
    both = trained(server, world, f"kto-packed-{engine}", "kto", "lora", ENGINES[engine], **packed)
    losses, weights = apart(alone, both)
    assert losses <= LOSS_TOLERANCE
    assert weights <= WEIGHT_TOLERANCE
    assert ("documents", True) in both.paths


@pytest.mark.parametrize(("stage", "adapter"), representatives([(1, "lora"), (2, "full")], (1, "lora")))
def test_prompts_that_two_ranks_compute_once_are_those_that_one_computes_twice(server, world, stage, adapter):
    """A layer runs twice in a pass then, and its gradients must be whole before they are reduced."""
    data = {"train": "WORLD/long.jsonl", "max_length": 128}
    parallel = {"engine": "deepspeed", "zero_stage": stage}
    whole = trained(
        server, world, f"whole-{stage}", "reward", adapter, data=data, gradient_checkpointing="on", duration="3 steps"
    )
    once = trained(server, world, f"once-{stage}", "reward", adapter, parallel, data=data, duration="3 steps")
    for name, shared in ((f"whole-{stage}", False), (f"once-{stage}", True)):
        plan = json.loads((world / name / "plan.json").read_text())["plan"]
        assert plan["reward"]["shared_prompts"]["value"] is shared
    losses, weights = apart(whole, once)
    assert losses <= LOSS_TOLERANCE
    assert weights <= WEIGHT_TOLERANCE
    # The twin: other rows.
    other = trained(server, world, f"other-{stage}", "reward", adapter, parallel, data=data, duration="3 steps", seed=7)
    assert apart(whole, other)[1] > WEIGHT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_step_of_texts_leaves_the_tower_alone(server, world, engine):
    """No rank has a gradient for it then, and Adam's momentum must not move it on. (ZeRO's flat buffers have zeros.)"""
    texts = {"data": {"train": "WORLD/seen-4.jsonl", "max_length": 512}, "duration": "4 steps"}
    alone = trained(server, world, f"texts-alone-{engine}", "sft-seen", "full", **texts)
    both = trained(server, world, f"texts-{engine}", "sft-seen", "full", ENGINES[engine], **texts)
    losses, weights = apart(alone, both)
    assert losses <= LOSS_TOLERANCE
    assert weights <= WEIGHT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mllama", "qwen2_5_vl"])
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_families_that_skip_layers_without_pictures(server, world, family, engine):
    base = world / family
    seeing(family, base) if family == "qwen2_5_vl" else seeing_family(family, base)
    how = {"model": str(base), "vision": {"tower": "adapter"}}
    alone = trained(server, world, f"{family}-alone-{engine}", "sft-seen", "lora", **how)
    both = trained(server, world, f"{family}-{engine}", "sft-seen", "lora", ENGINES[engine], **how)
    losses, weights = apart(alone, both)
    assert losses <= LOSS_TOLERANCE
    assert weights <= WEIGHT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_references_computed_once_of_pictures_and_texts(server, world, tmp_path, monkeypatch, engine):
    """One of three pictures is left for one rank, beside which the other runs a blank batch."""
    seen = [json.loads(line) for line in (world / "seen-2.jsonl").read_text().splitlines()][:-1]
    pairs = [
        {"prompt": one["messages"][:1], "chosen": one["messages"][1]["content"], "rejected": "none"} for one in seen
    ]
    (world / "seen-pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    how = {
        "stage": "dpo",
        "data": {"train": "WORLD/seen-pairs.jsonl", "max_length": 512},
        "alignment": {"reference": "cached"},
        "vision": {},
    }
    runs = []
    for name, parallel in (("alone", None), (engine, ENGINES[engine])):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))  # or the second finds what the first has computed
        runs.append(trained(server, world, f"seen-cached-{engine}-{name}", "sft-seen", "lora", parallel, **how))
    losses, weights = apart(*runs)
    assert losses <= LOSS_TOLERANCE
    assert weights <= WEIGHT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_a_reward_model_of_one_process_goes_on_where_weights_are_shared(server, world, engine):
    """The plan that it began with computes common prompts once, in two passes through a layer."""
    name, often = f"reward-goes-on-{engine}", {"duration": "4 steps", "checkpoint": {"every": "2 steps"}}
    whole = trained(server, world, name, "reward", "lora", **often)
    output, log = world / name, world / f"{name}-again.txt"
    assert json.loads((output / "plan.json").read_text())["plan"]["reward"]["shared_prompts"]["value"] is True
    shutil.rmtree(output / "checkpoint-4")
    (output / "MANIFEST.json").unlink()
    sharing = [f"parallel.{key}={value}" for key, value in ENGINES[engine].items()]
    assert server.run(["train", f"{output}.yaml", *sharing, "--resume"], log, ranks=2) == 0, log.read_text()
    again = {
        f"{file.name}: {key}": one for file in output.glob("*.safetensors") for key, one in load_file(file).items()
    }
    assert again.keys() == whole.weights.keys()
    assert max(float((again[key] - one).abs().max()) for key, one in whole.weights.items()) <= WEIGHT_TOLERANCE
