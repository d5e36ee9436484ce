"""Does the memory that the plan forecasts agree with what a run takes? On a CPU or a GPU, a fresh process per case.

    python benchmarks/memory.py [--device cuda] [--out FILE.json] [--only TEXT] [--from-python]
                                [--packed DATA.json | --distill DATA.json | --rollouts DATA.json]

A case is a model, a length, an adapter and whether layers are computed again. Its process builds the model as a run
does, by `surefoot`'s own set-up, and takes a few optimizer steps on random tokens, every one of them supervised. The
peak begins anew after set-up.

On a CPU (Linux only) it is the kernel's mark of resident memory, above what was resident after the imports and what of
the libraries' code is read in a step; the mark begins anew because the file of the weights is mapped while they are
read, and counts. On a GPU it is the most that torch had allocated, which is what the plan forecasts, above what a first
product leaves there (cuBLAS's workspaces); beside it stands the most that torch had reserved.

--packed: packed steps of a run on instructions instead, every micro-batch with a length of its own.
--distill: the same of stage distill, beside a teacher of the student's size.
--rollouts: steps of stage grpo that answer these instructions; rollouts and updates have a peak each.
--from-python: with the caches of glibc's threads, which `surefoot train` does without and a run from Python has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bases import SIZES as NAMED
from bases import Shape
from fresh import told_by
from surefoot.system import process

SIZES = {"22 M": Shape(8, 384, 8_192), "95 M": Shape(10, 768, 32_000), "71 M experts": NAMED["experts"]}
LENGTHS = (256, 1024)
ROWS = 2
ADAPTERS = ("full", "lora", "dora")
AGAIN = ("off", "on")
STEPS = 2
PACKED_SIZES = {"45 M": Shape(4, 512, 32_000), "125 M": Shape(12, 768, 32_000)}
ON_GPU = {"1.2 B": NAMED["1b"]}  # besides; the others are small beside what a GPU's libraries take
PACKED_STEPS = 12
ROLLOUTS, GROUP, ANSWER = 2, 4, 64  # steps, answers to a prompt, tokens of an answer at most
WORDS = 150  # of a prompt
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "holes", "apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--packed", type=Path, metavar="DATA", help="a JSON list of instructions, as LLaMA-Factory has")
    parser.add_argument("--rollouts", type=Path, metavar="DATA", help="the same, whose instructions are answered")
    parser.add_argument("--distill", type=Path, metavar="DATA", help="the same, beside a teacher in memory")
    parser.add_argument("--from-python", action="store_true", help="with the caches of glibc's threads")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = options.case
        own = measure_rollouts if case["rollouts"] else measure_packed if case["data"] else measure
        print(json.dumps(own(case)))
        return
    if not options.from_python:
        process.restart_without_thread_cache()
    settle_device(options.device)
    found = []
    data = options.packed or options.distill or options.rollouts
    kinds = cases(options.device, packed=data is not None)
    with tempfile.TemporaryDirectory() as temporary:
        for size, length, adapter, again in itertools.product(*kinds, ADAPTERS, AGAIN):
            case = {
                "name": f"{size} {length} {adapter} {again}",
                "device": options.device,
                "size": size,
                "length": length,
                "adapter": adapter,
                "again": again,
                "precision": options.precision,
                "folder": temporary,
                "data": str(data.resolve()) if data else None,
                "rollouts": options.rollouts is not None,
                "distill": options.distill is not None,
            }
            if options.only not in case["name"]:
                continue
            row = case | told_by([sys.executable, __file__, "--case", json.dumps(case)])
            row["off"] = row["forecast"] / row["peak"] - 1
            found.append(row)
            print(
                f"{case['name']:>22}  forecast {row['forecast'] / 2**20:7.0f} MiB  peak {row['peak'] / 2**20:7.0f} MiB"
                f"  {row['off']:+.1%}{_beside(row)}",
                flush=True,
            )
    if not found:
        sys.exit(f"--only: no case has {options.only!r} in its name")
    worst = max(found, key=lambda row: abs(row["off"]))
    print(f"worst: {worst['name']} {worst['off']:+.1%} of {len(found)} cases")
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def cases(device: str, *, packed: bool) -> tuple[dict[str, Shape], tuple[int, ...]]:
    """Models by name, and lengths."""
    sizes, lengths = (PACKED_SIZES, (512,)) if packed else (SIZES, LENGTHS)
    return sizes | (ON_GPU if device == "cuda" else {}), lengths


def settle_device(device: str) -> None:
    """A run takes the GPU that it sees."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device: torch sees no GPU here")
    if device == "cpu" and torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _beside(row: dict[str, Any]) -> str:
    own = {name: row[name] for name in ("reserved", "rollout", "update") if name in row}
    return "".join(f"  {name} {size / 2**20:7.0f} MiB" for name, size in own.items())


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """In this process: the forecast of the plan, the peak, and what the parts of the forecast are."""
    import torch

    from surefoot.config.load import load_config
    from surefoot.data.batching.batch import Batch
    from surefoot.methods.losses.sft import sft_loss
    from surefoot.runs.load_models import load_models
    from surefoot.runs.make_plan import make_plan
    from surefoot.runs.parity.fast_paths import planned_paths
    from surefoot.training.step import train_step

    text = Path(case["folder"]) / "one.json"
    text.write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    shape, device = cases(case["device"], packed=False)[0][case["size"]], case["device"]
    base, path = _world(case, shape, text, f"batch: {{size: {ROWS}, micro: {ROWS}}}\n")
    config = load_config(path).config
    plan = make_plan(config, measure=False)
    process.bound_product_caches(device)
    before, code = _start(device)
    loaded = load_models(config, plan, base, None)
    for one in planned_paths(plan):
        one.install(loaded.engine.model)
    _begin(device)
    draw = torch.Generator().manual_seed(0)
    length = case["length"]
    for step in range(1, STEPS + 1):
        ids = torch.randint(0, shape.vocabulary, (ROWS, length), generator=draw)
        batch = Batch(ids, ids.roll(-1, 1), None, ids.numel(), (length,) * ROWS, tuple(range(ROWS)))
        if case.get("packed"):  # one row of as many tokens, of documents a quarter as long
            documents = (length // 4,) * (4 * ROWS)
            batch = replace(
                batch,
                input_ids=ids.view(1, -1),
                targets=batch.targets.reshape(1, -1),
                lengths=documents,
                examples=tuple(range(4 * ROWS)),
                documents=documents,
            )
        train_step(loaded.engine, sft_loss, [batch], step=step, lr=1e-4, scale=None, settings=loaded.settings)
    return _found(plan, loaded.engine.model, device, before, code)


def measure_packed(case: dict[str, Any]) -> dict[str, Any]:
    """The same of a run's own first steps, each another set of documents."""
    import torch

    from surefoot.config.load import load_config
    from surefoot.runs.load_models import planned_tokenizer
    from surefoot.runs.make_plan import make_plan
    from surefoot.runs.trial import ready

    shape, device = cases(case["device"], packed=True)[0][case["size"]], case["device"]
    base, path = _world(case, shape, Path(case["data"]), "batch: {size: 16}\n", _TAUGHT if case["distill"] else "")
    config = load_config(path).config
    planned_tokenizer(base, make_plan(config, measure=False).tokenizer)  # the imports
    process.bound_product_caches(device)
    before, code = _start(device)
    models = []
    _keep_teacher(models)
    with ready(config, PACKED_STEPS) as one:
        models.append(one.loaded.engine.model)
        _begin(device)
        rows = []
        for step in range(1, PACKED_STEPS + 1):
            batches = one.batches(step)
            one.step(step, batches)
            rows += [batch.tokens for batch in batches]
        return _found(one.plan, torch.nn.ModuleList(models), device, before, code) | {
            "rows": rows,
            "held": one.plan.batch.tokens,
        }


def _keep_teacher(models: list[Any]) -> None:
    """Append the model that stage distill will open as its teacher."""
    from surefoot.methods.distill import teacher

    make = teacher.teacher_of

    def kept(model: Any, *rest: Any) -> Any:
        models.append(model)
        return make(model, *rest)

    teacher.teacher_of = kept


def measure_rollouts(case: dict[str, Any]) -> dict[str, Any]:
    """Steps of stage grpo that begin with a rollout each; `rollout` and `update` are the peaks of these alone."""
    from surefoot.config.load import load_config
    from surefoot.runs.load_models import planned_tokenizer
    from surefoot.runs.make_plan import make_plan
    from surefoot.runs.trial import ready

    shape, device = cases(case["device"], packed=True)[0][case["size"]], case["device"]
    base, path = _world(case, shape, _even_prompts(case), f"batch: {{size: {2 * GROUP}, micro: 4}}\n", _GRPO)
    config = load_config(path).config
    planned_tokenizer(base, make_plan(config, measure=False).tokenizer)  # the imports
    process.bound_product_caches(device)
    before, code = _start(device)
    with ready(config, ROLLOUTS) as one:
        told: dict[str, list[int]] = {"rollout": [], "update": []}
        make = one.run.task.ready
        assert make is not None
        for step in range(1, ROLLOUTS + 1):
            _begin(device)
            batches = make(step, one.batches(step))
            told["rollout"].append(_found(one.plan, one.loaded.engine.model, device, before, code)["peak"])
            _begin(device)
            one.step(step, batches)
            found = _found(one.plan, one.loaded.engine.model, device, before, code)
            told["update"].append(found["peak"])
        most = {name: max(sizes) for name, sizes in told.items()}
        return found | most | {"peak": max(most.values())}


def _even_prompts(case: dict[str, Any]) -> Path:
    """As a file of its own: one text under many numbers, so that every step is as large as the plan's largest."""
    words = " ".join(one["output"] for one in json.loads(Path(case["data"]).read_text())).split()[:WORDS]
    rows = [{"instruction": f"{number}: {' '.join(words)}"} for number in range(10, 74)]
    path = Path(case["folder"]) / "prompts.json"
    path.write_text(json.dumps(rows))
    return path


_GRPO = f"grpo: {{rewards: [length_of.py:tokens], group: {GROUP}, max_new_tokens: {ANSWER}}}\n"
_TAUGHT = "distill: {teacher: TEACHER}\n"
_REWARD = "def tokens(prompts, responses, response_ids):\n    return [sum(ids) % 7 for ids in response_ids]\n"


def _world(case: dict[str, Any], shape: Shape, data: Path, batch: str, section: str = "") -> tuple[Path, Path]:
    """The folder of the base and the file of the config. section: of another stage than sft, which it then is."""
    folder = Path(case["folder"])
    base = folder / case["size"].replace(" ", "")
    teacher = base.with_name(f"{base.name}-teacher")
    for made in (base, teacher) if section == _TAUGHT else (base,):
        if not made.exists():
            words = [sys.executable, "-c", _BUILD, str(made), json.dumps(asdict(shape)), str(data), case["device"]]
            subprocess.run(words, check=True, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
    reward = folder / "length_of.py"
    reward.write_text(_REWARD)
    of_experts = ", experts: false" if case["adapter"] == "dora" and "num_experts" in shape.own else ""
    adapter = "" if case["adapter"] == "full" else f"adapter: {{kind: {case['adapter']}, rank: 32{of_experts}}}\n"
    path = folder / "run.yaml"
    packing = ", packing: on" if case.get("packed") else ""
    path.write_text(
        f"stage: {section.partition(':')[0] or 'sft'}\nmodel: {base}\n"
        f"output: {folder / 'run'}\nprecision: {case['precision']}\n{adapter}{batch}"
        f"data: {{train: {data}, max_length: {case['length']}, template: alpaca{packing}}}\n"
        f"duration: {PACKED_STEPS} steps\ngradient_checkpointing: {case['again']}\nattention: sdpa\n"
        f"{case.get('more', '')}{section.replace('length_of.py', str(reward)).replace('TEACHER', str(teacher))}"
    )
    return base, path


def _start(device: str) -> tuple[int, int]:
    """Bytes that are held now, and on a CPU those that are pages of files."""
    import torch

    one = torch.ones(8, 8, device=device).bfloat16()
    one @ one  # the libraries' own buffers
    if device == "cpu":
        return _status("VmRSS"), _status("RssFile")
    one.requires_grad_()
    (one @ one).sum().backward()  # on a GPU the backward pass has a thread, and so a workspace, of its own
    one.grad = None
    return torch.cuda.memory_allocated(), 0


def _begin(device: str) -> None:
    """The mark of the peak begins again."""
    from surefoot.system import hardware

    hardware.forget_peak(device)
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")


def _found(plan: Any, model: Any, device: str, before: int, code: int) -> dict[str, Any]:
    from surefoot.runs.load_models import mapped_weights
    from surefoot.system import hardware

    if device == "cuda":
        import torch

        held, more = 0, {"reserved": torch.cuda.max_memory_reserved()}
    else:
        held, more = max(0, _status("RssFile") - code - mapped_weights(model)), {}
    memory = plan.memory
    return {
        "forecast": memory.total,
        "peak": hardware.peak_memory(device) - before - held,
        **more,
        "parts": {key: getattr(memory, key) for key in PARTS},
        "kernels": {key: value.value for key, value in vars(plan.kernels).items()},
    }


def _status(field: str) -> int:
    """Bytes of this process, by the kernel's name."""
    fields = Path("/proc/self/status").read_text().split(f"{field}:")[1]
    return int(fields.split()[0]) * 1024


_BUILD = """
import json, sys
from pathlib import Path
from bases import Shape, build_base
texts = [" ".join(record.values()) for record in json.loads(Path(sys.argv[3]).read_text())]
build_base(Path(sys.argv[1]), texts, Shape(**json.loads(sys.argv[2])), sys.argv[4])
"""

if __name__ == "__main__":
    main()
