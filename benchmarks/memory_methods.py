"""The memory that the plan forecasts for other stages and models than those of memory_shapes.py, and what torch would
allocate there: pairs, reward models, rollouts and updates, a teacher, experts, quantized bases, pictures.

    PYTHONPATH=tests python -m helpers.pretend_gpu python benchmarks/memory_methods.py [--only TEXT] [--out FILE.json]

As memory_shapes.py, on shapes alone; but with the run's own data, batches and loss, in two steps of micro-batches of
4,096 tokens. Rollouts and updates have a peak each.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import memory
from bases import SIZES, Shape
from memory_shapes import AGAIN, EDGE, LENGTH, Cases, build_empty, run_cases, write_empty

# Qwen3-30B-A3B, from its config.json.
_A3B = Shape(
    48,
    2048,
    151_936,
    {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
    },
    large=True,
)
# Qwen2.5-VL-7B, from its config.json.
_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 128_000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EYE = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
PICTURE = 32  # tokens of a picture's side
MODELS = {"1b": SIZES["1b"], "8b": SIZES["8b"], "30b-a3b": _A3B}
_LORA = "adapter: {kind: lora, rank: 32}\n"
_DRAWN = "max_new_tokens: 64, patience: 99"
# Name -> (model, stage, records, what else the config has).
CASES = {
    "8b dpo": ("8b", "dpo", "pairs", _LORA),
    "8b dpo full": ("8b", "dpo", "pairs", ""),
    "8b orpo": ("8b", "dpo", "pairs", f"{_LORA}alignment: {{loss: orpo}}\n"),
    "8b kto": ("8b", "kto", "judged", _LORA),
    "8b reward": ("8b", "reward", "pairs", _LORA),
    "8b distill": ("8b", "distill", "answers", f"{_LORA}distill: {{teacher: TEACHER}}\n"),
    "8b asft": ("8b", "sft", "answers", f"{_LORA}sft: {{loss: asft}}\n"),
    "8b grpo": ("8b", "grpo", "prompts", f"{_LORA}grpo: {{{_DRAWN}, mismatch_bound: null, rewards: [REWARD]}}\n"),
    "8b ppo": ("8b", "ppo", "prompts", f"{_LORA}ppo: {{{_DRAWN}, reward: REWARD}}\n"),
    "vl-7b": ("vl-7b", "sft", "pictures", _LORA),
    "vl-7b tower trained": ("vl-7b", "sft", "pictures", f"{_LORA}vision: {{tower: trained, projector: trained}}\n"),
    "vl-7b tower adapted": ("vl-7b", "sft", "pictures", f"{_LORA}vision: {{tower: adapter, projector: adapter}}\n"),
    "8b nf4": ("8b", "sft", "answers", f"{_LORA}precision: {{compute: bf16, base: nf4}}\n"),
    "8b int8": ("8b", "sft", "answers", f"{_LORA}precision: {{compute: bf16, base: int8}}\n"),
    "30b-a3b": ("30b-a3b", "sft", "answers", _LORA),
    "30b-a3b experts frozen": ("30b-a3b", "sft", "answers", "adapter: {kind: lora, rank: 32, experts: false}\n"),
}
ANSWERS = 16  # of a rollout
_LONG = 3 * LENGTH // 2  # letters, of which each is a token
_RECORDS = {
    "answers": {"instruction": "y" * 100, "output": "z" * _LONG},
    "pairs": {"prompt": "y" * 100, "chosen": "z" * _LONG, "rejected": "x" * _LONG},
    "judged": {"prompt": "y" * 100, "completion": "z" * _LONG},
    "prompts": {"prompt": "y" * (LENGTH - 350)},
    "pictures": {"instruction": "<image>" + "y" * 100, "output": "z " * (LENGTH // 5)},
}
_REWARD = (
    "def first(prompts, responses, response_ids=None):\n    return [float(n % 7) for n in range(len(responses))]\n"
)


def main() -> None:
    run_cases(__doc__, __file__, _cases, lambda case: measure(**case))


def _cases(folder: str) -> Cases:
    for name, again in itertools.product(CASES, AGAIN):
        yield f"{name} {again}", {"name": name, "again": again, "folder": folder}


def measure(name: str, again: str, folder: str) -> dict[str, Any]:
    """In this process. `rollout`: the peak while answers are drawn, 0 where none are."""
    import torch
    from pretend_cuda import device

    from surefoot.config.load import load_config
    from surefoot.runs.trial import ready

    device().set_limit(EDGE)
    device().set_shapes_only(True)
    config = load_config(_write(name, again, Path(folder))).config
    _without_numbers()
    before, _ = memory._start("cuda")
    most = {"rollout": 0, "update": 0}

    def note(part: str) -> None:
        most[part] = max(most[part], torch.cuda.max_memory_allocated() - before)
        memory._begin("cuda")

    with ready(config, memory.STEPS) as one:
        memory._begin("cuda")
        for step in range(1, memory.STEPS + 1):
            batches = one.batches(step)
            if one.run.task.ready is not None:
                batches = one.run.task.ready(step, batches)
                note("rollout")
            one.step(step, batches)
            note("update")
        return {"forecast": one.plan.memory.total, "peak": max(most.values()), "rollout": most["rollout"]}


def _write(name: str, again: str, folder: Path) -> Path:
    """The config's file, beside the data and the models that it names."""
    model, stage, records, more = CASES[name]
    full = "adapter" not in more
    base = folder / (model + " whole" * full)
    template = "alpaca"
    teacher, reward, data = folder / "1b", folder / "reward.py", folder / f"{records}.jsonl"
    if records == "pictures":
        template = "tokenizer"
        if not base.exists():
            _write_seeing(base)
    elif not base.exists():
        build_empty(base, MODELS[model], 4 if full else 2)
    if "TEACHER" in more and not teacher.exists():
        build_empty(teacher, MODELS["1b"], 2)
    reward.write_text(_REWARD)
    rows = [_numbered(_RECORDS[records], number) for number in range(10, 34)]
    if records == "judged":
        rows = [row | {"label": number % 2 == 0} for number, row in enumerate(rows)]
    if records == "pictures":
        rows = [row | {"images": ["one.png"]} for row in rows]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    micro = 1 if records == "pairs" else 2
    path = folder / "run.yaml"
    path.write_text(
        f"stage: {stage}\nmodel: {base}\noutput: {folder / 'run'}\n"
        f"data: {{train: {data}, max_length: {LENGTH}, template: {template}, packing: off}}\n"
        f"batch: {{size: {ANSWERS if records == 'prompts' else 2 * micro}, micro: {micro}}}\nduration: 2 steps\n"
        f"gradient_checkpointing: {again}\nattention: sdpa\n"
        + ("" if "precision" in more else "precision: bf16\n")
        + more.replace("TEACHER", str(teacher)).replace("REWARD", f"{reward}:first")
    )
    return path


def _numbered(record: dict[str, str], number: int) -> dict[str, Any]:
    first = next(iter(record))
    return record | {first: f"{number} {record[first]}"}


def _write_seeing(folder: Path) -> None:
    """Qwen2.5-VL-7B without numbers, and a picture beside it."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from helpers import zoo_tokenizers
    from helpers.seeing import MARKS, TEMPLATE, picture

    zoo_tokenizers.qwen(folder, TEMPLATE, thinks=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)}, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(folder)
    ids = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(text_config={**_TEXT, "eos_token_id": ids["<|im_end|>"]}, vision_config=_EYE)
    for key, mark in zip(("vision_start", "image", "vision_end", "video"), MARKS, strict=True):
        setattr(config, f"{key}_token_id", ids[mark])
    config.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_processor_type": "Qwen2VLImageProcessorFast"}))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    write_empty(folder, model, 2, tied=False)
    picture(folder.parent / "one.png", "red", (28 * PICTURE, 28 * PICTURE))


def _without_numbers() -> None:
    """Leave out what reads, compares or times numbers, which are not there."""
    import torch

    from surefoot.models import adapter_targets, load
    from surefoot.runs import load_models, make_plan, prepare, trial
    from surefoot.runs.parity.fast_paths import planned_paths
    from surefoot.system import hardware

    def load_and_check(run: Any, *given: Any) -> Any:
        loaded = load_models.load_models(run.config, run.plan, run.base, None)
        for one in planned_paths(run.plan):
            one.install(loaded.engine.model)
        return run, loaded, {}

    def of_whole_patches(self: Any, patches: Any) -> Any:  # a product, as the operator has no form for shapes alone
        return torch.nn.functional.linear(patches.flatten(1), self.weight.flatten(1)).view(len(patches), -1, 1, 1, 1)

    torch.nn.Conv3d.forward = of_whole_patches
    adapter_targets.zero_norm_rows = lambda model, targets: {}
    hardware.host_memory = lambda: (EDGE, EDGE)
    load._non_finite = lambda *given: []
    load_models.verify_head = lambda model, device: 0.0
    prepare.plan_of = lambda config, existing, lengths: make_plan.make_plan(config, lengths=lengths, measure=False)
    prepare.check_disk = lambda *given, **named: ()
    trial.load_and_check = load_and_check


if __name__ == "__main__":
    main()
