"""A mixture of experts through the command line: trained, killed, resumed, reloaded, merged, verified, on two ranks."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.faults import gives
from helpers.tiers import representatives
from helpers.zoo_modern import MODERN
from surefoot.commands.main import main
from surefoot.models import merge
from surefoot.models.peft import ParamWrapper

EXPERTS, CHOSEN, RANK, STEPS = 6, 2, 3, 4
DEAD = [4, 5]
IDS = torch.arange(3, 43).reshape(2, 20) * 7 % 300
# Logits of merged weights against those of the adapter beside them, of the largest: fp32 in another order of sums.
MERGED = 1e-5
# Weights after four steps on one rank and on two, whose sums have another order: a rate times what AdamW makes of it.
TWO_RANKS = 1e-5
LOSSES = 5e-6  # of about 7, the same sums in another order
ROWS = [
    {"instruction": f"Say {word} {count} times.", "output": " ".join([word] * count)}
    for word in ("one", "two", "heron", "sky")
    for count in (1, 2, 4)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Its routers send no token to the last two experts: of two numbers and what they are turned about, two are above
    zero."""
    folder = MODERN["qwen3_moe"](
        tmp_path_factory.mktemp("base") / "base", num_experts=EXPERTS, num_local_experts=EXPERTS
    )
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("mlp.gate.weight")]:
        first, second, *_ = weights[name]
        weights[name] = torch.stack([first, -first, second, -second, 0 * first, 0 * first])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def written(folder: Path, base: Path, name: str, **changes) -> Path:
    """The config of a run into folder/name."""
    (folder / "train.json").write_text(json.dumps(ROWS))
    config = {
        "stage": "sft",
        "model": str(base),
        "adapter": {"kind": "lora", "rank": RANK},
        "data": {"train": str(folder / "train.json"), "max_length": 128},
        "precision": "fp32",
        "batch": {"size": 4, "micro": 2},
        "optim": {"lr": 1e-2},
        "duration": f"{STEPS} steps",
        "checkpoint": {"every": "2 steps"},
        "output": str(folder / name),
    } | changes
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def finished(server, base, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    code = server.run(["train", str(written(folder, base, "run"))], folder / "log.txt")
    assert code == 0, (folder / "log.txt").read_text()
    return folder / "run"


def said(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    return result.exit_code, result.output


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits


def by_peft(base: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_log_and_report_have_the_loads_and_name_the_dead(finished):
    steps = rows(finished)
    assert len(steps) == STEPS
    assert all(1 < row["expert_busiest"] <= EXPERTS / CHOSEN for row in steps)
    assert all(row["experts_idle"] >= 2 * len(DEAD) for row in steps)
    load = json.loads((finished / "expert_load.json").read_text())
    assert load["dead"] == {"0": DEAD, "1": DEAD}
    for layer, counts in load["tokens"].items():
        assert [counts[number] for number in DEAD] == [0, 0], layer
        assert all(counts[: DEAD[0]])
    first, last = (sum(counts) for counts in load["tokens"].values())
    assert first >= last > 0  # the last layer routes what is learned
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", (finished / "report.html").read_text())
    assert cells.count(", ".join(map(str, DEAD))) == 2  # of each layer
    (caution,) = [line for line in (finished / "run.log").read_text().splitlines() if "expert_load.json" in line]
    assert gives(caution, 2 * len(DEAD))
    assert gives(caution, 2 * EXPERTS)


def test_every_expert_with_tokens_learned_and_the_dead_stayed_as_drawn(finished):
    weights = load_file(finished / "adapter_model.safetensors")
    outer = {name: one for name, one in weights.items() if name.endswith("experts.lora_B.weight")}
    assert len(outer) == 2
    for name, one in outer.items():
        moved = [bool(one[:, number::EXPERTS].any()) for number in range(EXPERTS)]
        assert moved == [number not in DEAD for number in range(EXPERTS)], name
        slowest = [bool(one[:, number * RANK : (number + 1) * RANK].any()) for number in range(EXPERTS)]
        assert all(slowest)  # twin: read in the wrong order, the dead ones would have learned


def test_killed_and_resumed_it_is_the_same_run(server, base, finished, tmp_path):
    path = str(written(tmp_path, base, "run"))
    log = tmp_path / "log.txt"
    assert server.run(["train", path], log, {"at": "step", "n": 4}) == -9
    assert server.run(["train", path, "--resume"], log) == 0, log.read_text()
    assert said("verify", finished, "--same-as", tmp_path / "run")[0] == 0
    load = [(one / "expert_load.json").read_bytes() for one in (finished, tmp_path / "run")]
    assert load[0] == load[1]  # of the whole run, the steps before the kill too
    name = "adapter_model.safetensors"
    weights = load_file(tmp_path / "run" / name)
    for key in [key for key in weights if "experts.lora_B" in key]:
        weights[key][0, EXPERTS] += 1e-6  # twin: one number of one expert
    save_file(weights, tmp_path / "run" / name, {"format": "pt"})
    assert said("verify", tmp_path / "run")[0] == 4


def test_reloaded_by_peft_and_merged_it_is_what_was_trained(base, finished, tmp_path):
    trained = logits(by_peft(base, finished))
    assert apart(logits(AutoModelForCausalLM.from_pretrained(base)), trained) > 100 * MERGED
    code, output = said("export", finished, "--merge", "--out", tmp_path / "merged")
    assert code == 0, output
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert apart(merged, trained) <= MERGED
    assert said("verify", finished)[0] == said("verify", tmp_path / "merged")[0] == 0
    for name, wrong in WRONG.items():
        assert apart(logits(by_peft(base, wrong(finished, tmp_path / name))), merged) > 10 * MERGED, name


def changed(adapter: Path, folder: Path, change) -> Path:
    """A copy of the adapter with `change` made in B of all experts."""
    folder.mkdir()
    shutil.copy(adapter / "adapter_config.json", folder)
    weights = load_file(adapter / "adapter_model.safetensors")
    for key in [key for key in weights if ".experts." in key and key.endswith("lora_B.weight")]:
        weights[key] = change(weights[key]).contiguous()
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def _without_the_first(b: torch.Tensor) -> torch.Tensor:
    return b * (torch.arange(b.shape[1]) % EXPERTS != 0)


def _expert_slowest(b: torch.Tensor) -> torch.Tensor:
    return b.view(len(b), RANK, EXPERTS).transpose(1, 2).reshape(len(b), -1)


WRONG = {
    "dropped": lambda adapter, folder: changed(adapter, folder, _without_the_first),
    "order": lambda adapter, folder: changed(adapter, folder, _expert_slowest),
}


@pytest.mark.parametrize("broken", [_without_the_first, _expert_slowest])
def test_twin_a_merge_that_drops_an_expert_or_mistakes_the_order_is_not_exported(
    finished, tmp_path, monkeypatch, broken
):
    exact = ParamWrapper.get_delta_weight

    def wrong(layer: ParamWrapper, name: str) -> torch.Tensor:
        weight = layer.lora_B[name].get_parameter("weight")
        kept = weight.data
        weight.data = broken(kept)
        try:
            return exact(layer, name)
        finally:
            weight.data = kept

    merging = merge._merged_parameters

    def merged(outermost: ParamWrapper) -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(ParamWrapper, "get_delta_weight", wrong)
            return merging(outermost)

    monkeypatch.setattr(merge, "_merged_parameters", merged)
    code, output = said("export", finished, "--merge", "--out", tmp_path / "merged")
    assert code != 0, output
    assert not (tmp_path / "merged").exists()


ENGINES: dict[str, dict[str, object]] = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    **{f"zero{stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)},
}


def rows(run: Path) -> list[dict[str, float]]:
    """Of the log, those of steps."""
    found = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    return [row for row in found if "loss" in row]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run)]


ONE_EACH = {"size": 4, "micro": 1}


def on_two(server, base: Path, folder: Path, engine: str, change: str = "", **changes) -> Path:
    changes = {"batch": ONE_EACH, "parallel": ENGINES[engine]} | changes
    log = folder / "log.txt"
    path = str(written(folder, base, "run", **changes))
    assert server.run(["train", path], log, ranks=2, change=change) == 0, log.read_text()
    return folder / "run"


def furthest(run: Path, other: Path) -> tuple[float, float]:
    """The largest difference of losses, and that of weights."""
    one, two = (load_file(run / "adapter_model.safetensors") for run in (run, other))
    assert list(one) == list(two)
    steps = max(abs(a - b) for a, b in zip(losses(run), losses(other), strict=True))
    return steps, max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def straight(server, base, tmp_path_factory):
    """The run on two ranks, by engine."""
    return functools.cache(lambda engine: on_two(server, base, tmp_path_factory.mktemp("two"), engine))


@pytest.mark.parametrize("engine", representatives(ENGINES, "fsdp2", "zero3"))
def test_on_two_ranks_it_is_the_same_run(straight, base, finished, engine):
    two = straight(engine)
    steps, weights = furthest(finished, two)
    assert (steps <= LOSSES, weights <= TWO_RANKS) == (True, True)
    assert (two / "adapter_config.json").read_text() == (finished / "adapter_config.json").read_text()
    loads = [json.loads((run / "expert_load.json").read_text()) for run in (finished, two)]
    assert loads[0] == loads[1]  # tokens of both ranks, and so the same dead experts
    assert loads[0]["dead"] == {"0": DEAD, "1": DEAD}
    spread = [[(row["expert_busiest"], row["experts_idle"]) for row in rows(run)] for run in (finished, two)]
    assert spread[0] == spread[1]
    used = [rank["fast_paths"]["adapter"] for rank in json.loads((two / "environment.json").read_text())["ranks"]]
    form = "experts" if engine in ("fsdp2", "zero3") else None
    assert [(one["used"], one.get("form")) for one in used] == [(True, form)] * 2
    assert apart(logits(by_peft(base, two)), logits(by_peft(base, finished))) <= TWO_RANKS


def test_twin_experts_that_learn_from_the_tokens_of_one_rank_are_noticed(server, base, finished, tmp_path):
    two = on_two(server, base, tmp_path, "fsdp2", "distributed.changed:keeps_experts_from_learning")
    assert furthest(finished, two)[1] > 10 * TWO_RANKS


@pytest.fixture(scope="module")
def killed(server, base, tmp_path_factory):
    """The same, killed before its last step: killed(engine, folder) copies it to folder / "run"."""

    @functools.cache
    def once(engine: str) -> Path:
        folder = tmp_path_factory.mktemp("killed")
        path = written(folder, base, "run", batch=ONE_EACH, parallel=ENGINES[engine])
        assert server.run(["train", str(path)], folder / "log.txt", {"at": "step", "n": 4}, ranks=2) == -9
        return folder / "run"

    return lambda engine, folder: shutil.copytree(once(engine), folder / "run")


@pytest.mark.parametrize("engine", representatives(["fsdp2", "zero2", "zero3"], "fsdp2"))
def test_killed_on_two_ranks_and_resumed_it_is_the_same_run(server, base, straight, killed, tmp_path, engine):
    run, log = killed(engine, tmp_path), tmp_path / "log.txt"
    path = written(tmp_path, base, "run", batch=ONE_EACH, parallel=ENGINES[engine])
    assert server.run(["train", str(path), "--resume"], log, ranks=2) == 0, log.read_text()
    assert said("verify", straight(engine), "--same-as", run)[0] == 0


def test_a_checkpoint_of_two_ranks_continues_on_one(server, base, finished, killed, tmp_path):
    killed("fsdp2", tmp_path)
    path, log = written(tmp_path, base, "run", batch=ONE_EACH), tmp_path / "log.txt"
    assert server.run(["train", str(path), "--resume"], log) == 0, log.read_text()
    assert "resuming from" in log.read_text()
    steps, weights = furthest(finished, tmp_path / "run")
    assert (steps <= LOSSES, weights <= TWO_RANKS) == (True, True)


@pytest.mark.parametrize("engine", representatives(ENGINES, "ddp"))
def test_the_load_balancing_loss_is_that_of_one_rank(server, base, tmp_path, engine):
    """Three examples a step: a rank has a micro-batch without tokens, which counts nowhere; in the third step, of one
    example, it has no other."""
    changes = {
        "data": {"train": str(tmp_path / "one" / "train.json"), "max_samples": 7, "max_length": 128},
        "model": {"path": str(base), "router_aux_loss_coef": 0.1},
        "adapter": {"kind": "lora", "rank": RANK, "router": True},
        "batch": {"size": 3, "micro": 1},
        # Of a gradient that is hardly more than rounding Adam would make a whole step; below eps it makes none.
        "optim": {"lr": 1e-2, "eps": 1e-4},
    }
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    log = tmp_path / "log.txt"
    assert server.run(["train", str(written(tmp_path / "one", base, "run", **changes))], log) == 0, log.read_text()
    one, two = tmp_path / "one" / "run", on_two(server, base, tmp_path / "two", engine, **changes)
    steps, weights = furthest(one, two)
    assert (steps <= LOSSES, weights <= TWO_RANKS) == (True, True)
    balanced = [
        [json.loads(line).get("aux_loss") for line in (run / "trainer_log.jsonl").read_text().splitlines()]
        for run in (one, two)
    ]
    found = [[value for value in values if value is not None] for values in balanced]
    assert len(found[0]) == len(found[1]) == STEPS
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) <= LOSSES
