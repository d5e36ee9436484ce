"""Small runs of every method on a GPU, pretended or not, and where they wait."""

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

import surefoot
from gpu.devices import QUIET
from helpers import pretend_gpu, stored_forms, zoo
from helpers.experts import moe_model
from helpers.seeing import picture, seeing
from helpers.seeing_families import FAMILIES as SEEING
from helpers.seeing_families import seeing_family
from helpers.tiny_models import tiny_llama
from helpers.zoo_modern import MODERN
from surefoot.commands.main import main
from surefoot.method_facts.losses import GROUP_LOSSES, PAIR_LOSSES
from surefoot.training import loop

ON_THE_PRETEND_GPU = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(not pretend_gpu.is_here(), reason="runs on the pretend GPU: make rehearsal"),
]
ON_ANY_GPU = [
    pytest.mark.rehearsal,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU, and none is pretended"),
]
# Two runs on a GPU take the same kernels only if no clock chooses among them. Packed rows have one kernel.
CHOSEN: dict[str, Any] = {} if pretend_gpu.is_here() else QUIET
CHOSEN_PACKED: dict[str, Any] = CHOSEN and {**QUIET, "attention": {"cudnn": "off"}}
LORA = {"kind": "lora", "rank": 4}
BF16, FP32 = {"precision": "bf16"}, {"precision": "fp32"}
OFFLOADED: dict[str, Any] = {"parallel": {"offload": "optimizer"}}
EIGHT_BITS = {"optim": {"name": "adamw_8bit", "lr": 1e-3}}
# One pass of each micro-batch reads where its learned tokens stand, and transformers whether a row is padded.
SMOOTHED = {"exo_pair": {"label_smoothing": 0.1}}  # by which it divides
PER_PASS = {("aten::nonzero", "methods/losses/sft.py:supervised_places"), ("item", "models/forward.py:hidden_states")}
NARROWED = ("item", "models/forward.py:narrowed_logits")  # transformers' look at padding, again
BESIDES = {
    "dora": {("copy to the host", "kernels/dora.py:_factors")},  # once a step: the factors of all layers
    "dpo-full": {NARROWED},
    "adamw-8bit": {("synchronize", "training/optimizer.py:step")},  # bitsandbytes' own, after each matrix
    "offloaded": {
        ("copy to the host", "training/engine/base.py:clip"),  # the step is taken there
        ("synchronize", "training/engine/offloaded.py:wait_for_room"),  # more under way than the largest gradient
        ("copy to the device", "training/engine/offloaded.py:<dictcomp>"),  # the norm of each group, for the guard
        ("copy to the device", "training/optimizer_state.py:moment_norm_sum"),  # whether they are finite
    },
    "ppo": {NARROWED, *((why, "methods/losses/ppo.py:at_places") for why in ("aten::nonzero", "aten::index"))},
    "grpo": {NARROWED, ("aten::nonzero", "methods/losses/grpo.py:answer_places")},
}
_LOADS = ("copy to the host", "training/routing.py:take")  # of the experts, once a step
# transformers' own code: grids of pictures, and the layers' order in which windows are attended to.
_SEEING = {(why, "models/forward.py:hidden_states") for why in ("copy to the host", "copy to the device")} | {
    (why, "models/forward.py:hidden_states") for why in ("aten::repeat_interleave", "aten::unique_consecutive")
}
# torch's grouped_mm needs strides of 16 bytes, which the tiny experts lack: a loop over experts stands in for it.
_UNALIGNED = {
    ("copy to the host", place) for place in ("kernels/experts.py:grouped", "models/fast/last_block.py:forward")
}
_COUNTED = {("copy to the host", "training/step.py:_balance")}  # where the step's tokens went, before they are learned
# torch's picture of a tower's patches in transformers: which of them are blank, which belong together.
_BLANK = {(why, "models/forward.py:hidden_states") for why in ("aten::index", "aten::nonzero")}
BESIDES |= {
    "grpo-rewards": BESIDES["grpo"],
    "added": {NARROWED},
    "kernels-plain": {NARROWED},
    "experts-balanced": {_LOADS, *_UNALIGNED, *_COUNTED},
    "experts-stored": {_LOADS, *_UNALIGNED},
    "experts-hybrid": {_LOADS, *_UNALIGNED},
    "images-pairs": _SEEING,
    "images-adapter": _SEEING,
    "images-cross": _SEEING,
    "images-timm": _SEEING,
    "images-tiles": _SEEING,
    "images-smolvlm": _SEEING | _BLANK,
    "experts-lora": {_LOADS, *_UNALIGNED},
    "experts-full": {_LOADS, *_UNALIGNED},
    "images": _SEEING,
    "images-trained": _SEEING,
    "images-grpo": _SEEING | BESIDES["grpo"],
}
STEPS = 3
TOOL = """
class Counter:
    def reset(self, record, seed):
        self.turns = 0

    def step(self, answer):
        self.turns += 1
        return {"observation": f"so {len(answer)}", "reward": len(answer) % 3, "done": self.turns > 1}
"""
THE_ONE = ("copy to the host", "training/step.py:_to_host")


def lengths(prompts, responses):
    return [float(len(text)) for text in responses]


def make_world(folder: Path) -> Path:
    """A tiny model, and data for each method."""
    tiny_llama(folder / "base")
    numbers = range(1, 9)
    of_stage = {
        "sft": [{"instruction": f"Say {n}.", "output": "heron " * n} for n in numbers],
        "pretrain": [{"text": "heron " * (4 + n)} for n in numbers],
        "pairs": [{"prompt": f"Say {n}.", "chosen": "a e i", "rejected": "b c d " * n} for n in numbers],
        "kto": [{"prompt": f"Say {n}.", "completion": "a e i" * n, "label": n % 2 == 0} for n in numbers],
        "prompts": [{"prompt": f"Say number {n}.", "answer": str(n)} for n in numbers],
    }
    for name, rows in of_stage.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tool.py").write_text(TOOL)
    return folder


def _make_experts(folder: Path) -> None:
    tiny_llama(folder)
    own = json.loads((folder / "config.json").read_text())
    for path in folder.glob("*.safetensors"):
        path.unlink()
    fields = {key: own[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    moe_model("qwen3_moe", **fields).save_pretrained(folder)


def _make_eye(folder: Path) -> None:
    seeing("qwen2_5_vl", folder)
    _make_pictures(folder.parent)


def _make_other_eye(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        seeing_family(name, folder)
        _make_pictures(folder.parent)

    return make


def _make_pictures(world: Path) -> None:
    """Records with pictures, pairs with pictures, and a reward."""
    colours = ("red", "blue", "green") * 3
    for colour in colours:
        picture(world / f"{colour}.png", colour)
    rows = [
        {
            "conversations": [{"from": "human", "value": f"<image>What {n}?"}, {"from": "gpt", "value": colour}],
            "images": [f"{colour}.png"],
        }
        for n, colour in enumerate(colours)
    ]
    pairs = [
        {"prompt": [{"role": "user", "content": f"<image>What {n}?"}], "chosen": colour, "rejected": "none"}
        | {"images": [f"{colour}.png"]}
        for n, colour in enumerate(colours)
    ]
    for name, records in (("pictures", rows), ("picture-pairs", pairs)):
        (world / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    (world / "long.py").write_text("def long(prompts, responses):\n    return [float(len(one)) for one in responses]\n")


def _make_stored(folder: Path) -> None:
    stored_forms.in_mxfp4(MODERN["gpt_oss"](folder, hidden_size=64, intermediate_size=64, head_dim=16))


def _make_graders(folder: Path) -> None:
    """A reward model, a function, and records with what each grader asks for."""
    train(config_of(folder.parent, folder.name, "reward", "pairs", precision="bf16"))
    function = "def short(prompts, responses, answer):\n    return [float(len(one)) for one in responses]\n"
    (folder.parent / "own.py").write_text(function)
    rows = [{"prompt": f"Say number {n}.", "answer": str(n), "letter": "A", "tests": "assert one"} for n in range(1, 9)]
    (folder.parent / "graded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_teacher(folder: Path) -> None:
    tiny_llama(folder, seed=1, layers=3)


def _make_taught(folder: Path) -> None:
    """What a teacher says, stored."""
    if not (folder.parent / "teacher").exists():
        make("teacher", folder.parent)
    config = config_of(folder.parent, "unused", "distill", distill={"teacher": str(folder.parent / "teacher")})
    path = folder.parent / "teach.yaml"
    path.write_text(yaml.safe_dump(config))
    found = CliRunner().invoke(main, ["teach", str(path), "--out", str(folder), "--top", "8"])
    assert found.exit_code == 0, found.output


# Folders of a world that few cases need.
_MADE: dict[str, Callable[[Path], None]] = {
    "experts": _make_experts,
    "eye": _make_eye,
    "judge": _make_graders,
    "teacher": _make_teacher,
    "taught": _make_taught,
    "stored": _make_stored,
    "blocks": lambda folder: stored_forms.in_fp8(zoo.llama3(folder)) and None,
    "dropping": lambda folder: zoo.gpt2(folder) and None,
    "hybrid": lambda folder: MODERN["falcon_h1"](folder) and None,
    "linear": lambda folder: MODERN["qwen3_next"](folder) and None,
    **{f"eye-{name}": _make_other_eye(name) for name in SEEING},
}


def make(name: str, world: Path) -> None:
    """name: a key of `_MADE`."""
    _MADE[name](world / name)


def config_of(
    world: Path, name: str, stage: str = "sft", data: str = "sft", of_data: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """of_data: further keys of the section `data`."""
    config = {
        "stage": stage,
        "model": str(world / "base"),
        "adapter": LORA,
        "data": {"train": str(world / f"{data}.jsonl"), "max_length": 128, **(of_data or {})},
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-3},
        "duration": "3 steps",
        "output": str(world / name),
    }
    packs = (of_data or {}).get("packing") == "on"
    config |= CHOSEN_PACKED if packs else CHOSEN
    return {key: value for key, value in (config | changes).items() if value is not None}


def train(config: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    """The rows of the steps; the run was on the GPU."""
    surefoot.train(config, stream=io.StringIO(), **how)
    run = Path(config["output"])
    assert json.loads((run / "plan.json").read_text())["plan"]["device"]["value"] == "cuda"
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


CASES = {
    "lora": BF16,
    "dora": BF16 | {"adapter": {"kind": "dora", "rank": 4, "dropout": 0.1}},
    "full": BF16 | {"adapter": None},
    "full-fp32": FP32 | {"adapter": None},
    "lora-fp16": {"precision": "fp16"},
    "packed": BF16 | {"of_data": {"packing": "on"}},
    "checkpointed": BF16 | {"gradient_checkpointing": True},
    "bos": BF16 | {"adapter": None, "bos": {"prepend": "on", "scale": 0.5}},
    "pretrain": BF16 | {"stage": "pretrain", "records": "pretrain", "adapter": None},
    "reward": BF16 | {"stage": "reward", "records": "pairs"},
    "dpo": BF16 | {"stage": "dpo", "records": "pairs"},
    "dpo-full": BF16 | {"stage": "dpo", "records": "pairs", "adapter": None},
    "kto": BF16 | {"stage": "kto", "records": "kto"},
    "ppo": BF16 | {"stage": "ppo", "records": "prompts", "ppo": {"max_new_tokens": 4}},
    "grpo": BF16 | {"stage": "grpo", "records": "prompts", "grpo": {"max_new_tokens": 4, "group": 2, "kl": 0.1}},
    "offloaded": BF16 | OFFLOADED | {"adapter": None},
    "muon": BF16 | {"adapter": None, "optim": {"name": "muon", "lr": 1e-3}},
    "adafactor": BF16 | {"adapter": None, "optim": {"name": "adafactor", "lr": 1e-3}},
    "rmsprop": BF16 | {"adapter": None, "optim": {"name": "rmsprop", "lr": 1e-3}},
    "sgd": BF16 | {"adapter": None, "optim": {"name": "sgd", "lr": 1e-3}},
    "neftune": BF16 | {"optim": {"lr": 1e-3, "neftune_alpha": 5}},
    "ddp": BF16 | {"parallel": {"engine": "ddp"}},  # of one process
    "rollback": BF16 | {"guard": {"rollback": "on"}, "checkpoint": {"every": "1 steps"}},
    "reward-divergence": BF16 | {"stage": "reward", "records": "pairs", "reward": {"loss": "divergence"}},
    **{f"sft-{loss}": BF16 | {"sft": {"loss": loss}} for loss in ("dft", "eaft", "asft")},
    **{
        f"dpo-{loss}": BF16 | {"stage": "dpo", "records": "pairs", "alignment": {"loss": loss} | SMOOTHED.get(loss, {})}
        for loss in PAIR_LOSSES
        if loss != "sigmoid"
    },
    **{
        f"grpo-{loss}": BF16
        | {"stage": "grpo", "records": "prompts", "grpo": {"max_new_tokens": 4, "group": 2, "loss": loss}}
        for loss in GROUP_LOSSES
        if loss != "dapo"
    },
    "grpo-rewards": BF16
    | {
        "stage": "grpo",
        "records": "graded",
        "needs": "judge",
        "grpo": {
            "max_new_tokens": 4,
            "group": 2,
            "run_code": True,
            "rewards": [
                *("exact", "numeric", "json", "math", "WORLD/own.py:short", "WORLD/judge"),
                {"name": "choice", "field": "letter"},
                {"name": "regex", "pattern": "a"},
                {"name": "length", "longest": 3},
                {"name": "code", "field": "tests"},
            ],
        },
    },
    "experts-lora": BF16 | {"needs": "experts", "model": "WORLD/experts", "adapter": {"kind": "lora", "rank": 8}},
    "experts-full": BF16 | {"needs": "experts", "model": "WORLD/experts", "adapter": None},
    "distill": BF16 | {"stage": "distill", "needs": "teacher", "distill": {"teacher": "WORLD/teacher"}},
    "distill-stored": BF16 | {"stage": "distill", "needs": "taught", "distill": {"teacher": "WORLD/taught"}},
    "distill-drawn": BF16
    | {
        "stage": "distill",
        "needs": "teacher",
        "distill": {"teacher": "WORLD/teacher", "on_policy": 1.0, "max_new_tokens": 8, "beta": 0.5, "sft": 0.1},
    },
    "dpo-cached": BF16 | {"stage": "dpo", "records": "pairs", "alignment": {"reference": "cached"}},
    "pissa": BF16 | {"adapter": LORA | {"start": "pissa"}},
    "olora": BF16 | {"adapter": LORA | {"start": "olora"}},
    "part": BF16 | {"adapter": None, "model": {"path": "WORLD/base", "trained": [r"model\.layers\.(last 1)\..*"]}},
    "drawn-weights": BF16 | {"adapter": None, "model": {"path": "WORLD/base", "weights": "random"}},
    "rates": BF16 | {"optim": {"lr": 1e-3, "rates": [{"of": "lora_B", "lr": 1e-2}]}},
    "added": BF16 | {"tokenizer": {"add": ["<think>"], "add_special": ["<|mark|>"]}},
    "kernels-plain": BF16 | {"kernels": {"adapter": "plain", "loss": "plain", "last_block": "plain"}},
    "deterministic": BF16 | {"attention": {"flash": "on", "deterministic": "on"}},
    "dropping": BF16 | {"needs": "dropping", "model": "WORLD/dropping", "adapter": None},
    "hybrid": BF16 | {"needs": "hybrid", "model": "WORLD/hybrid"},
    "experts-hybrid": BF16 | {"needs": "linear", "model": "WORLD/linear"},
    "experts-balanced": BF16
    | {"needs": "experts", "model": {"path": "WORLD/experts", "router_aux_loss_coef": 0.01}, "adapter": LORA},
    # Bases that are stored in few bits and decoded; gpt-oss has attention sinks as well.
    "experts-stored": BF16 | {"needs": "stored", "model": "WORLD/stored"},
    "blocks": BF16 | {"needs": "blocks", "model": "WORLD/blocks"},
    # A base whose weights are codes, and moments that are: bitsandbytes' CPU kernels stand in for those of CUDA.
    "nf4": {"precision": {"compute": "bf16", "base": "nf4"}},
    "nf4-dora": {"precision": {"compute": "bf16", "base": "nf4"}, "adapter": {"kind": "dora", "rank": 4}},
    "nf4-packed": {"precision": {"compute": "bf16", "base": "nf4"}, "of_data": {"packing": "on"}},
    "nf4-dpo": {"precision": {"compute": "bf16", "base": "nf4"}, "stage": "dpo", "records": "pairs"},
    "int8": {"precision": {"compute": "bf16", "base": "int8"}},
    "adamw-8bit": BF16 | EIGHT_BITS | {"adapter": None},
    "offloaded-8bit": BF16 | OFFLOADED | EIGHT_BITS | {"adapter": None},
    "qat": {"precision": {"compute": "bf16", "qat": "int4", "qat_group_size": 32}, "adapter": None},
    "qat-nvfp4": {"precision": {"compute": "bf16", "qat": "nvfp4", "qat_after": 1}, "adapter": None},
    "qat-mxfp4": {"precision": {"compute": "bf16", "qat": "mxfp4"}},
    "evaluated": BF16
    | {
        "of_data": {"eval": "WORLD/sft.jsonl"},
        "eval_every": "1 steps",
        "eval_at_start": True,
        "samples": {"count": 2, "max_new_tokens": 4},
        "metrics": {"names": ["exact_match"], "examples": 2, "max_new_tokens": 4},
    },
    "workers": BF16 | {"of_data": {"packing": "on", "workers": 2}},  # threads make and copy batches
    "grpo-turns": BF16
    | {
        "stage": "grpo",
        "records": "prompts",
        "grpo": {"max_new_tokens": 48, "group": 2, "environment": {"name": "WORLD/tool.py:Counter", "turns": 3}},
    },
    "grpo-evaluated": BF16
    | {
        "stage": "grpo",
        "records": "prompts",
        "of_data": {"eval": "WORLD/prompts.jsonl"},
        "eval_every": "1 steps",
        "grpo": {"max_new_tokens": 4, "group": 2, "eval_answers": 2, "ahead": 1, "top_p": 0.9},
    },
    "images": BF16 | {"needs": "eye", "records": "pictures", "model": "WORLD/eye"},
    "images-reward": BF16 | {"needs": "eye", "stage": "reward", "records": "picture-pairs", "model": "WORLD/eye"},
    "images-grpo": BF16
    | {
        "needs": "eye",
        "stage": "grpo",
        "records": "pictures",
        "model": "WORLD/eye",
        "of_data": {"eval": "WORLD/pictures.jsonl"},
        "grpo": {"rewards": ["WORLD/long.py:long"], "max_new_tokens": 4, "group": 2, "kl": 0.1},
    },
    "images-trained": BF16
    | {
        "needs": "eye",
        "records": "pictures",
        "model": "WORLD/eye",
        "adapter": None,
        "vision": {"tower": "trained", "projector": "trained"},
    },
    "images-adapter": BF16
    | {
        "needs": "eye",
        "records": "pictures",
        "model": "WORLD/eye",
        "vision": {"tower": "adapter", "projector": "adapter"},
    },
    "images-pairs": BF16 | {"stage": "dpo", "needs": "eye", "records": "picture-pairs", "model": "WORLD/eye"},
    **{
        f"images-{case}": BF16 | {"needs": f"eye-{name}", "records": "pictures", "model": f"WORLD/eye-{name}"}
        for case, name in {"cross": "mllama", "timm": "gemma3n", "tiles": "lfm2_vl", "smolvlm": "smolvlm"}.items()
    },
}


_QUANTIZED = [case for case in CASES if case.startswith(("nf4", "int8")) or case.endswith("8bit")]
NEEDED = {
    **dict.fromkeys(("qat", "qat-nvfp4", "qat-mxfp4"), ("torchao",)),
    **dict.fromkeys(_QUANTIZED, ("bitsandbytes",)),
    "images-timm": ("torchvision", "timm"),
    "images-tiles": ("torchvision",),
}


class Died(Exception):
    pass


def dying(patch: pytest.MonkeyPatch, after: int) -> None:
    """The run ends in the step after these, as by a kill."""
    real, taken = loop.train_step, []

    def train_step(*given: Any, **named: Any) -> Any:
        if len(taken) == after:
            raise Died
        taken.append(1)
        return real(*given, **named)

    patch.setattr(loop, "train_step", train_step)


def started(world: Path, case: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, further arguments of surefoot.train)"""
    changes = json.loads(json.dumps(CASES[case]).replace("WORLD", str(world)))
    needs = changes.pop("needs", "")
    if needs and not (world / needs).exists():
        make(needs, world)
    data = changes.pop("records", "sft")
    config = config_of(world, f"{case}-{name}", changes.pop("stage", "sft"), data, **changes)
    scored = config["stage"] in ("ppo", "grpo") and not needs
    return config, {"reward": lengths} if scored else {}


def waits_of_a_step(config: dict[str, Any], **how: Any) -> tuple[Counter[tuple[str, str | None]], list[dict[str, Any]]]:
    """Where the last step of a run waited, as (why, place), but for the one place that a step is meant to have; and the
    run's rows. A GPU that is not pretended does not say where."""
    if not pretend_gpu.is_here():
        return Counter(), train(config, **how)
    from pretend_cuda import Waits

    with Waits() as waits:
        rows = train(config, **how)
    last = Counter({(why, place): n for (why, place, step), n in waits.seen.items() if step == STEPS})
    assert last.pop(THE_ONE) == 1
    assert last.get(_LOADS, 0) <= 1
    return last, rows
