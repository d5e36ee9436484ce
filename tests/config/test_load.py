"""One error lists every mistake, each with its place, what is wrong and what to do; overrides behave like the file."""

import contextlib
import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.configs import ANYTHING, mutated_configs, write_config
from surefoot.config import load, paths, problems
from surefoot.config.dump import dump_config, plain_config
from surefoot.config.explain import override_of
from surefoot.config.keys import all_keys, as_yaml
from surefoot.config.load import load_config
from surefoot.config.paths import nearest_path
from surefoot.config.schema import RunConfig
from surefoot.config.suggestions import OTHER_NAMES, nearest_key
from surefoot.method_facts.losses import OTHER_WAYS
from surefoot.system.errors import InputError

GALLERY = Path(__file__).resolve().parents[1] / "golden" / "messages" / "config.txt"


def faults(path: Path, *overrides: str) -> list[str]:
    """The messages, without the folder of the file."""
    try:
        load_config(path, overrides)
    except InputError as error:
        return [str(fault).replace(f"{path.parent}/", "") for fault in error.faults]
    return []


MISTAKES = [  # top-level key and its text; the config has stage, model, adapter, data, output in lines 1 to 5
    ("learning_rte", "1e-4"),
    ("outputs", "x"),
    ("zebra", "1"),
    ("threads", "2"),
    ("guard", "{zebra: 1}"),
    ("adapter", "{kind: lora, rank: eight}"),
    ("adapter", "{kind: lroa}"),
    ("adapter", "lora"),
    ("adapter", "{rank: 8}"),
    ("adapter", "{kind: lora, targets: [q_proj, 3]}"),
    ("adapter", "{kind: lora, rslora: yes}"),
    ("batch", '{size: "16"}'),
    ("batch", "{size: 0}"),
    ("batch", "{size: true}"),
    ("optim", "{lr: .nan}"),
    ("optim", "{lr: 1e999}"),
    ("optim", "{betas: [0.9]}"),
    ("report_to", "[tensorbord]"),
    ("report_to", "[wandb, 3]"),
    ("report_to", "tensorbord"),
    ("report_to", "wandb"),
    ("optim", "~"),
    ("duration", "3"),
    ("duration", "1e999 steps"),
    ("model", "{path: 1.10}"),
    ("seed", "-1"),
    ("output", ""),
    ("compile", "true"),
    ("model", "{base: models/llama}"),
    ("model", "{path: models/llama, base: bf16}"),
    ("data", "{path: data/train.jsonl}"),
    ("data", "{train: [{file: data/train.jsonl}]}"),
    ("optim", "{kind: adamw}"),
    ("optim", "{rates: [3]}"),
    ("grpo", "{rewards: numeric}"),
    ("grpo", "{rewards: [3]}"),
]
OVERRIDES = [
    "data.train[3].epochs=1",
    "optim.lr",
    "=3",
    "optim.=3",
    "optim.lr=abc",
    "optim.lrr=1",
    "lora_rank=8",
    "adapter.targets=[a",
    "adapter.targets.0=x",
    "data.eval=2%",
    "data.eval=0.5 %",
    "data.train=2%",
    "data.train=gone/x.json",
    "batch={size: 4, micro: 8}",
    "model=3",
]


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        stage="stf",
        model=str(tmp_path / "models" / "lama"),
        adapter="{kind: lora, rank: eight}",
        data=f"{{train: {tmp_path / 'trian.jsonl'}, max_lenght: 512}}",
        early_stopping="{}",
        output="",
        seed="1\nseed: 2",
    )
    places = [fault.split(": ")[:2] for fault in faults(path, "batch.micro=99", "optim.lr=-1")]
    assert places == [
        ["run.yaml:1:8", "stage"],
        ["run.yaml:2:8", "model.path"],
        ["run.yaml:3:29", "adapter.rank"],
        ["run.yaml:4:15", "data.train.path"],
        [f"run.yaml:4:{29 + len(str(tmp_path))}", "data.max_lenght"],
        ["run.yaml:5:17", "early_stopping"],
        ["run.yaml:7:1", "seed"],
        ["run.yaml", "output"],
        ["override batch.micro=99", "batch.micro"],
        ["override optim.lr=-1", "optim.lr"],
    ]


def test_a_misspelt_key_is_one_mistake(tmp_path: Path) -> None:
    assert len(faults(write_config(tmp_path, output="", outptu="runs/x"))) == 1
    assert len(faults(write_config(tmp_path, model="", model_name_or_path="x/y"))) == 1
    assert len(faults(write_config(tmp_path, data="{trian: x.json}"))) == 1
    evaluation = f"{{train: {tmp_path / 'train.jsonl'}, evall: 0.1}}"
    assert len(faults(write_config(tmp_path, data=evaluation, early_stopping="{}"))) == 1, "not a contradiction as well"
    assert len(faults(write_config(tmp_path, adapter="{kind: !!str 3}"))) == 1, "a refused tag is no wrong type as well"


def test_twin_a_missing_key_without_a_misspelt_one_is_reported(tmp_path: Path) -> None:
    assert len(faults(write_config(tmp_path, output="", zebra="runs/x"))) == 2


def typos(name: str, places: Iterable[int]) -> set[str]:
    swapped = {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in places if i + 1 < len(name)}
    dropped = {name[:i] + name[i + 1 :] for i in places if i < len(name)} if len(name) > 2 else set()
    return (swapped | dropped | {name + "s", name.upper(), name.replace("_", "-")}) - {name, ""}


@pytest.mark.parametrize("places", [range(1), pytest.param(range(1, 99), marks=pytest.mark.slow)], ids=["first", "all"])
def test_every_key_is_found_behind_its_typos(places: range) -> None:
    names = {key.name for key in all_keys().values()}
    for key in all_keys().values():
        beside = [one.name for one in all_keys().values() if one.group == key.group and one is not key]
        shared = set().union(*(typos(name, range(99)) for name in beside if len(name) == len(key.name)))  # top_p, top_k
        for typo in typos(key.name, places) - names - shared:
            near = nearest_key(f"{key.group}.{typo}" if key.group else typo)
            assert near is not None, typo
            assert near.path == key.path, typo


def test_names_from_other_tools_lead_to_our_keys() -> None:
    assert set(OTHER_NAMES.values()) <= set(all_keys())
    assert not set(OTHER_NAMES) & {key.path for key in all_keys().values()}, "a key of ours is no foreign name"
    for name, ours in OTHER_NAMES.items():
        for written in (name, name.replace("_", "-"), f"training.{name}"):
            near = nearest_key(written)
            assert near is not None, written
            assert near.path == ours, written


MEANT = {  # an unknown key and the keys beside it -> the key that it stands for
    ("model.base", ("base",)): "model.path",
    ("data.path", ("path",)): "data.train",
    ("data.train.file", ("file",)): "data.train.path",
    ("grpo.rewards.fn", ("fn", "weight")): "grpo.rewards.name",
    ("adapter.learning_rate", ("learning_rate",)): "optim.lr",
    ("adapter.rnak", ("rnak",)): "adapter.rank",
}


@pytest.mark.parametrize(("unknown", "given"), MEANT)
def test_a_required_key_that_is_missing_comes_before_an_equal_name_elsewhere(
    unknown: str, given: tuple[str, ...]
) -> None:
    near = nearest_key(unknown, dict.fromkeys(given))
    assert near is not None
    assert near.path == MEANT[unknown, given]


def test_twin_where_nothing_required_is_missing_no_such_key_is_named() -> None:
    near = nearest_key("model.base", dict.fromkeys(("path", "base")))
    assert near is not None
    assert near.path == "precision.base"
    (problem,) = problems.shape_problems(
        {"stage": "sft", "model": {"path": "x", "base": "y"}, "data": {"train": "z"}, "output": "o"}
    )
    assert problem.involves == (), "a name elsewhere is mentioned, but not taken for what was meant"


CONTRADICTIONS = {  # changes -> the key that is reported, the other key that it names
    (("early_stopping", "{patience: 2}"),): ("early_stopping", "data.eval"),
    (("samples", "{count: 2}"),): ("samples.count", "data.eval"),
    (("eval_every", "50 steps"),): ("eval_every", "data.eval"),
    (("optim", "{decay: 0.2}"),): ("optim.decay", "optim.schedule"),
    (("optim", "{schedule: wsd, warmup: 0.6, decay: 0.5}"),): ("optim.decay", "optim.warmup"),
    (("batch", "{size: 4, micro: 8}"),): ("batch.micro", "batch.size"),
    (("attention", "{implementation: eager, flash: on}"),): ("attention.flash", "attention.implementation"),
    (("attention", "{implementation: sdpa, flash: off, mem_efficient: off, cudnn: off, math: off}"),): (
        "attention.implementation",
        "flash",
    ),
    (("attention", "{flash: off, mem_efficient: off, cudnn: off, math: off}"),): ("attention.implementation", "cudnn"),
    (("adapter", ""), ("precision", "{base: fp16}")): ("precision.base", "adapter"),
    (("adapter", ""), ("precision", "{base: nf4}")): ("precision.base", "adapter"),
    (("metrics", "{names: [exact_match]}"),): ("metrics.names", "data.eval"),
    (("checkpoint", "{best: exact_match}"),): ("checkpoint.best", "metrics.names"),
    (("stage", "pretrain"), ("data", "{train: a/b, train_on: last}")): ("data.train_on", "stage"),
    (("stage", "pretrain"), ("data", "{train: a/b, template: chatml}")): ("data.template", "stage"),
    (("stage", "pretrain"), ("data", "{train: a/b, format: alpaca}")): ("data.format", "stage"),
    (("stage", "pretrain"), ("data", "{train: {path: a/b, format: sharegpt}}")): ("data.train.format", "stage"),
    (("stage", "pretrain"), ("data", "{train: a/b, eval: 2}"), ("samples", "{count: 2}")): ("samples.count", "stage"),
    (("optim", "{momentum: 0.9}"),): ("optim.momentum", "optim.name"),
    (("optim", "{name: adafactor, momentum: 0.9}"),): ("optim.momentum", "optim.name"),
    (("optim", "{name: sgd, betas: [0.8, 0.9]}"),): ("optim.betas", "optim.momentum"),
    (("optim", "{name: rmsprop, betas: [0.8, 0.9]}"),): ("optim.betas", "optim.name"),
    (("optim", "{name: sgd, eps: 1e-6}"),): ("optim.eps", "optim.name"),
    (("optim", "{name: adafactor, eps: 1e-6}"),): ("optim.eps", "optim.name"),
    (("report_to", "[wandb, wandb]"),): ("report_to", "2 times"),
    (("tracking", "{offline: true}"),): ("tracking.offline", "report_to"),
    (("reward", "{center: 0.01, loss: divergence}"),): ("reward.loss", "reward.center"),
    (("alignment", "{beta: 0.2}"),): ("alignment.beta", "stage"),
    (("ppo", "{kl: 0.2}"),): ("ppo.kl", "stage"),
    (("stage", "dpo"), ("alignment", "{good: 2}")): ("alignment.good", "stage"),
    (("stage", "kto"), ("alignment", "{loss: ipo}")): ("alignment.loss", "stage"),
    (("stage", "dpo"), ("alignment", "{loss: ipo, label_smoothing: 0.1}")): (
        "alignment.label_smoothing",
        "alignment.loss",
    ),
    (("stage", "dpo"), ("alignment", "{margin: 1}")): ("alignment.margin", "alignment.loss"),
    (("stage", "dpo"), ("alignment", "{sft: 1, sft_prompt: true}")): ("alignment.sft_prompt", "alignment.loss"),
    (("stage", "dpo"), ("alignment", "{loss: simpo, sft_prompt: true}")): ("alignment.sft_prompt", "alignment.loss"),
    (("stage", "dpo"), ("alignment", "{loss: orpo, reference: model}")): ("alignment.reference", "alignment.loss"),
    (("stage", "dpo"), ("alignment", "{loss: simpo, reference: cached}")): ("alignment.reference", "alignment.loss"),
    (("stage", "kto"), ("alignment", "{reference: cached}")): ("alignment.reference", "stage"),
    (("stage", "kto"), ("batch", "{size: 1}")): ("batch.size", "stage"),
    (("checkpoint", "{best: reward_margin}"),): ("checkpoint.best", "metrics.names"),
    (("stage", "dpo"), ("adapter", ""), ("alignment", "{reference: adapter-off}")): ("alignment.reference", "adapter"),
    (("stage", "dpo"), ("data", "{train: a/b, format: alpaca}")): ("data.format", "stage"),
    (("stage", "kto"), ("data", "{train: {path: a/b, format: preference}}")): ("data.train.format", "stage"),
    (("data", "{train: a/b, format: judged}"),): ("data.format", "stage"),
    (("stage", "reward"), ("data", "{train: a/b, train_on: everything}")): ("data.train_on", "stage"),
    (("stage", "kto"), ("data", "{train: a/b, encoding: whole}")): ("data.encoding", "stage"),
    (("stage", "dpo"), ("optim", "{neftune_alpha: 5}")): ("optim.neftune_alpha", "stage"),
    (("stage", "reward"), ("data", "{train: a/b, eval: 2}"), ("samples", "{count: 2}")): ("samples.count", "stage"),
    (("stage", "reward"), ("reward", "{num_padding_at_beginning: 1}")): (
        "reward.num_padding_at_beginning",
        "reward.loss",
    ),
    (("stage", "ppo"), ("ppo", "{unsup_coef: 1}")): ("ppo.unsup_coef", "ppo.unsup_data"),
    (("stage", "ppo"), ("ppo", "{unsup_data: a/b}")): ("ppo.unsup_data", "ppo.unsup_coef"),
    (("stage", "ppo"), ("ppo", "{engine: vllm}")): ("ppo.engine", "ppo.vllm_url"),
    (("stage", "ppo"), ("ppo", "{vllm_url: 'http://a'}")): ("ppo.vllm_url", "ppo.engine"),
    (("stage", "ppo"), ("ppo", "{reward: 'https://host/score?api_key=abc'}")): ("ppo.reward", "password"),
    (("stage", "ppo"), ("ppo", "{engine: vllm, vllm_url: 'http://me:a@host'}")): ("ppo.vllm_url", "password"),
    (("stage", "grpo"), ("grpo", "{rewards: ['https://host/?token=abc']}")): (
        "grpo.rewards[0].name",
        "password",
    ),
    (("stage", "grpo"), ("grpo", "{environment: 'https://host/?api_key=abc'}")): (
        "grpo.environment.name",
        "password",
    ),
    (("stage", "grpo"), ("grpo", "{rewards: [json], engine: vllm, vllm_url: 'http://me:a@host'}")): (
        "grpo.vllm_url",
        "password",
    ),
    (("stage", "distill"), ("distill", "{teacher: a/b, on_policy: 1, engine: vllm, vllm_url: 'http://me:a@host'}")): (
        "distill.vllm_url",
        "password",
    ),
    (("stage", "ppo"), ("ppo", "{kl_horizon: 5}")): ("ppo.kl_horizon", "ppo.kl_target"),
    (("stage", "ppo"), ("data", "{train: a/b, max_length: 256}")): ("data.max_length", "ppo.max_new_tokens"),
    (("parallel", "{engine: single, nproc: 2}"),): ("parallel.nproc", "parallel.engine"),
    (("parallel", "{machines: 2}"),): ("parallel.machines", "parallel.nproc"),
    (("parallel", "{engine: single, nproc: 1, machines: 2}"),): ("parallel.nproc", "parallel.engine"),
    (("optim", "{schedule: constant, floor: 0.1}"),): ("optim.floor", "optim.schedule"),
    (("parallel", "{engine: ddp, zero_stage: 3}"),): ("parallel.zero_stage", "parallel.engine"),
    (("parallel", "{engine: ddp, offload: all}"),): ("parallel.offload", "parallel.engine"),
    (("adapter", "{kind: lora, publish: merged}"), ("precision", "{base: nf4}")): ("adapter.publish", "quantized"),
}
CONSISTENT: list[dict[str, str]] = [
    {"eval_every": "200 steps"},
    {"eval_every": "null"},
    {"samples": "{count: 0}"},
    {"optim": "{schedule: wsd, decay: 0.2}"},
    {"optim": "{schedule: cosine, decay: 0.1}"},
    {"optim": "{schedule: linear, floor: 0.1}"},
    {"optim": "{schedule: wsd, warmup: 500 steps, decay: 1}"},
    {"batch": "{size: 8, micro: 8}"},
    {"attention": "{implementation: eager, flash: off}"},
    {"attention": "{implementation: sdpa, flash: off, mem_efficient: off, cudnn: off}"},
    {"attention": "{implementation: eager, flash: off, mem_efficient: off, cudnn: off, math: off}"},
    {"precision": "{base: bf16}"},
    {"precision": "{base: nf4}"},
    {"optim": "{name: sgd, momentum: 0.9}"},
    {"optim": "{name: rmsprop, momentum: 0.9, eps: 1e-6}"},
    {"optim": "{name: muon, momentum: 0.9, betas: [0.8, 0.9], eps: 1e-6}"},
    {"optim": "{name: adamw_8bit, eps: 1e-6}"},
    {"optim": "{name: sgd, eps: 1e-8}"},
    {"report_to": "[wandb, tensorboard]", "tracking": "{project: x}"},
    {"stage": "pretrain", "data": "{train: {path: a/b, format: text}}"},
    {"data": "{train: a/b, eval: 2}", "metrics": "{names: [exact_match]}", "checkpoint": "{best: exact_match}"},
    {"checkpoint": "{best: none}"},
    {"stage": "dpo", "checkpoint": "{best: reward_margin}"},
    {"stage": "kto", "checkpoint": "{best: reward_accuracy}"},
    {"precision": "fp16", "adapter": ""},
    {"model": "meta-llama/Llama-3.1-8B"},
    {"model": "{path: meta-llama/Llama-3.1-8B, revision: main}"},
    {"stage": "reward", "reward": "{loss: divergence, num_padding_at_beginning: 1}"},
    {"stage": "dpo", "alignment": "{label_smoothing: 0.1, reference: adapter-off, sft: 0.1}"},
    {"stage": "dpo", "alignment": "{loss: simpo, margin: 1, reference: auto}"},
    {"stage": "kto", "alignment": "{good: 2, beta: 0.2, reference: model}"},
    {"stage": "dpo", "data": "{train: {path: a/b, format: preference}}"},
    {"stage": "ppo", "ppo": "{unsup_coef: 27.8, unsup_data: a/b, kl_target: 6, kl_horizon: 5}"},
    {"stage": "ppo", "ppo": "{engine: vllm, vllm_url: 'http://a'}"},
    {"stage": "ppo", "ppo": "{reward: 'https://host:8000/score?version=2&token_limit=5'}"},
    {"stage": "ppo", "data": "{train: a/b, max_length: 257, format: alpaca}"},
    {"parallel": "{engine: deepspeed, zero_stage: 3, offload: all, nproc: 2}"},
    {"parallel": "{engine: single, nproc: 1}"},
    {"ppo": "{kl: 0.1}", "alignment": "{}", "reward": "{loss: last}"},
]


def test_contradictions_name_both_keys(tmp_path: Path) -> None:
    for changes, (key, other) in CONTRADICTIONS.items():
        (message,) = faults(write_config(tmp_path, **dict(changes)))
        assert message.split(": ")[1] == key, changes
        assert other in message, changes


def test_samples_need_prompts(tmp_path: Path) -> None:
    data = f"{{train: {tmp_path / 'train.jsonl'}, eval: 2, train_on: %s}}"
    (message,) = faults(write_config(tmp_path, samples="{count: 2}", data=data % "everything"))
    assert message.split(": ")[1] == "samples.count"
    assert "data.train_on" in message
    assert faults(write_config(tmp_path, samples="{count: 2}", data=data % "responses")) == []


def test_what_only_looks_like_a_contradiction_passes(tmp_path: Path) -> None:
    for changes in CONSISTENT:
        assert faults(write_config(tmp_path, **changes)) == [], changes


def test_contradictions_vanish_with_their_cause(tmp_path: Path) -> None:
    data = f"{{train: {tmp_path / 'train.jsonl'}, eval: {tmp_path / 'heldout.jsonl'}}}"
    needs = {"early_stopping": "{}", "samples": "{count: 2}", "eval_every": "50 steps"}
    assert len(faults(write_config(tmp_path, **needs))) == 3
    assert faults(write_config(tmp_path, data=data, **needs)) == []
    assert len(faults(write_config(tmp_path, data=data, **needs | {"eval_every": "null"}))) == 1


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A config as a run saves it, with all that needs evaluation data."""
    wants = {"early_stopping": "{patience: 2}", "samples": "{count: 2}", "metrics": "{names: [exact_match]}"}
    wants |= {
        "eval_at_start": "true",
        "eval_every": "50 steps",
        "data": f"{{train: {tmp_path}/train.jsonl, eval: {tmp_path}/heldout.jsonl}}",
    }
    path = write_config(tmp_path, **wants)
    path.write_text(dump_config(load_config(path).config))
    return path


def named_overrides(path: Path) -> list[str]:
    return [fault.rpartition("(")[2].rstrip(")") for fault in faults(path, "data.eval=none")]


def test_an_override_that_takes_evaluation_away_is_told_the_others(saved: Path) -> None:
    others = named_overrides(saved)
    assert len(others) == 5
    config = load_config(saved, ["data.eval=none", *others]).config
    assert (config.data.eval, config.eval_every, config.metrics.names) == ("none", None, [])


def test_twin_each_of_them_is_needed(saved: Path) -> None:
    others = named_overrides(saved)
    for one in others:
        assert len(faults(saved, "data.eval=none", *(other for other in others if other != one))) == 1


def test_twin_without_the_rules_contradictions_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "contradictions", lambda _: [])
    assert faults(write_config(tmp_path, early_stopping="{}")) == []


PLACES = [
    ("output", "models/llama"),
    ("output", "models/llama/../llama"),
    ("output", "models/llama/config.json"),
    ("model", "{path: models/llama, revision: main}"),
    ("model", "models/adapter"),
]


def gallery() -> str:
    """Every mistake with its code and its message, of configs in this folder."""
    Path("models/adapter").mkdir(parents=True)
    Path("models/adapter/adapter_config.json").write_text("{}")
    cases = [(f"{key}: {text}", [], {key: text}) for key, text in MISTAKES]
    cases += [(override, [override], {}) for override in OVERRIDES]
    cases += [(f"{key}: {text}", [], {key: text}) for key, text in PLACES]
    found = []
    for title, overrides, changes in cases:
        with pytest.raises(InputError) as caught:
            load_config(write_config(Path(), **changes), overrides)
        found += [title, *(f"    [{fault.code}] {fault}" for fault in caught.value.faults)]
    return "\n".join(found) + "\n"


def test_one_mistake_is_one_message_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only place that quotes them; `PYTHONPATH=src:tests python tests/config/test_load.py` writes it anew."""
    monkeypatch.chdir(tmp_path)
    assert gallery() == GALLERY.read_text()


@pytest.mark.parametrize("key", problems.ELSEWHERE)
def test_what_is_set_elsewhere_is_told_where(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "OMP_NUM_THREADS" in faults(write_config(tmp_path), f"{key}=2")[0]
    monkeypatch.setattr(problems, "ELSEWHERE", {})  # twin
    assert "OMP_NUM_THREADS" not in faults(write_config(tmp_path), f"{key}=2")[0]


def test_twin_without_a_look_at_the_places_they_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "path_problems", lambda _: [])
    assert faults(write_config(tmp_path, output=str(tmp_path / "models" / "llama"))) == []


def test_places_that_are_in_doubt_are_not_compared(tmp_path: Path) -> None:
    (message,) = faults(write_config(tmp_path, model="{pth: x}", output=str(tmp_path / "models" / "llama")))
    assert message.split(": ")[:2] == ["run.yaml:2:9", "model.pth"]


def test_overrides(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    loaded = load_config(
        path,
        ["optim.lr=1e-5", "adapter.targets=[q_proj,v_proj]", "duration=2 epochs", "optim.lr=3e-5", "batch={size: 4}"],
    )
    assert loaded.config.optim.lr == 3e-5, "a later override beats an earlier one"
    assert loaded.config.adapter is not None
    assert loaded.config.adapter.targets == ["q_proj", "v_proj"]
    assert loaded.config.adapter.rank == 8
    assert str(loaded.config.duration) == "2 epochs"
    assert loaded.config.batch.size == 4
    assert load_config(path, ["adapter=null"]).config.adapter is None
    assert load_config(path, ["adapter="]).config.adapter is None
    assert load_config(write_config(tmp_path, seed="x"), ["seed=7"]).config.seed == 7, (
        "the file's value is not looked at"
    )


def test_overrides_on_short_and_long_forms(tmp_path: Path) -> None:
    for model in ("a/b", "{path: a/b}", "{path: a/b, revision: old}"):
        path = write_config(tmp_path, model=model, precision="bf16")
        config = load_config(
            path, ["model.revision=v2", "precision.tf32=on", "attention=sdpa", "attention.cudnn=off"]
        ).config
        assert (config.model.path, config.model.revision) == ("a/b", "v2")
        assert (config.precision.compute, config.precision.tf32) == ("bf16", "on")
        assert (config.attention.implementation, config.attention.cudnn) == ("sdpa", "off")
        replaced = load_config(path, ["model=c/d"]).config.model
        assert (replaced.path, replaced.revision) == ("c/d", None)


def test_an_override_that_replaces_a_group_is_named_and_not_the_file(tmp_path: Path) -> None:
    path = write_config(tmp_path, precision="{compute: bf16}", data="{train: {path: gone.json}}")
    (message,) = faults(path, "precision=fp8", f"data.train={tmp_path / 'train.jsonl'}")
    assert message.split(": ")[:2] == ["override precision=fp8", "precision.compute"]
    origins = load_config(path, ["precision=fp16", f"data.train={tmp_path / 'train.jsonl'}"]).origins
    assert origins["precision.compute"] == "override"


def test_twin_an_override_beside_a_value_leaves_that_to_the_file(tmp_path: Path) -> None:
    (message,) = faults(write_config(tmp_path, precision="{compute: fp8}"), "precision.tf32=on")
    assert message.split(": ")[:2] == ["run.yaml:6:22", "precision.compute"]


def test_lengths_of_examples(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    for value in ("auto", "8", "4096"):
        assert faults(path, f"data.max_length={value}") == []
    for value in ("7", "8.5", "true", "atuo"):
        assert len(faults(path, f"data.max_length={value}")) == 1


def test_origins(tmp_path: Path) -> None:
    path = write_config(tmp_path, optim="{lr: 1e-4, betas: [0.8, 0.9]}", precision="bf16", early_stopping="~")
    origins = load_config(path, ["seed=3", "checkpoint={keep: 1}", "optim.eps=1e-6"]).origins
    whole = load.expand_short_forms(plain_config(load_config(path).config))
    assert set(origins) == {key for key, _ in load._leaves(whole)}
    assert origins["model.path"] == f"{path}:2"
    assert origins["optim.lr"] == origins["optim.betas"] == f"{path}:6"
    assert origins["precision.compute"] == f"{path}:7"
    assert origins["early_stopping"] == f"{path}:8"
    assert origins["precision.tf32"] == origins["optim.warmup"] == origins["model.revision"] == "default"
    assert origins["seed"] == origins["checkpoint.keep"] == origins["optim.eps"] == "override"


def test_the_config_file_itself(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    (missing,) = faults(tmp_path / "rnu.yaml")
    assert missing.startswith("rnu.yaml: ")
    assert path.name in missing
    (tmp_path / "config.yaml").write_text(path.read_text())
    assert faults(tmp_path)[0].endswith("config.yaml?")


def test_a_suffix_in_common_makes_no_names_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meant() -> str:
        return nearest_path(tmp_path / "alpca.json", (".json", ".jsonl"))

    (tmp_path / "pt.jsonl").touch()
    assert not meant().endswith("?")
    (tmp_path / "alpaca.json").touch()
    assert meant().endswith("alpaca.json?")
    (tmp_path / "alpaca.json").unlink()
    monkeypatch.setattr(paths, "CLOSE", 0.0)  # twin
    assert meant().endswith("pt.jsonl?")


def test_a_link_that_leads_nowhere_is_not_its_own_remedy(tmp_path: Path) -> None:
    link = tmp_path / "away.jsonl"
    link.symlink_to("gone.jsonl")
    (message,) = faults(write_config(tmp_path, data=f"{{train: {link}}}"))
    assert "gone.jsonl" in message
    assert f"{link}?" not in message
    link.unlink()  # twin
    (message,) = faults(write_config(tmp_path, data=f"{{train: {link}}}"))
    assert "gone.jsonl" not in message


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    data = "{train: [~/train.jsonl, {path: ~/heldout.jsonl}], eval: ~/heldout.jsonl, template: ~/own.jinja}"
    config = load_config(write_config(tmp_path, model="~/models/llama", output="~/runs/x", data=data)).config
    assert isinstance(config.data.eval, tuple)
    sources = [source.path for source in (*config.data.train, *config.data.eval)]
    found = [config.model.path, config.output, config.data.template, *sources]
    names = ("models/llama", "runs/x", "own.jinja", "train.jsonl", "heldout.jsonl", "heldout.jsonl")
    assert found == [f"{tmp_path}/{name}" for name in names]


@given(mutated_configs())
def test_any_tree_is_accepted_or_explained(data: dict[str, Any]) -> None:
    """No tree brings the checks down, and none is refused without a reason or accepted by one check only."""
    found = load._problems(load.expand_short_forms(data))
    assert all(problem.key and problem.what and "Input should" not in problem.what for problem in found)
    if not found:
        RunConfig.model_validate(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(all_keys())), value=ANYTHING)
def test_any_value_through_an_override(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "run.yaml"
    if not path.exists():
        write_config(tmp_path)
    for message in faults(path, f"{key}={as_yaml(value)}"):
        assert message.startswith(("override", "run.yaml"))


def test_a_method_that_is_rounds_of_others_is_refused_with_that_way(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    for override in ("stage=online_dpo", "grpo.loss=online_dpo"):
        (message,) = [one for one in faults(path, override) if "online_dpo" in one]
        assert OTHER_WAYS["online_dpo"] in message
    assert not any(OTHER_WAYS["online_dpo"] in one for one in faults(path, "grpo.loss=online"))  # the twin


def test_the_saved_config_runs_again(tmp_path: Path) -> None:
    path = write_config(tmp_path, optim="{lr: 1e-4}", data=f"{{train: {tmp_path / 'train.jsonl'}, eval: 0.1}}")
    config = load_config(path, ["compile=off", "eval_every=1e3 steps"]).config
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_config(config))
    assert load_config(saved).config == config


def test_twin_pydantic_vocabulary_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "shown", lambda _: "Input should be a valid number")
    found = problems.shape_problems({"stage": 3})
    assert any("Input should" in problem.what for problem in found)


def test_examples_of_all_keys_are_accepted(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    path = write_config(tmp_path, data=f"{{train: {train}, eval: {train}}}")
    sections = {
        "model.trained": ["adapter=null"],
        "reward": ["stage=reward", "reward.loss=divergence"],
        "alignment": ["stage=dpo"],
        "alignment.good": ["stage=kto"],
        "alignment.bad": ["stage=kto"],
        "alignment.margin": ["stage=dpo", "alignment.loss=simpo"],
        "alignment.sft_prompt": ["stage=dpo", "alignment.loss=orpo"],
        "ppo": ["stage=ppo"],
        "distill": ["stage=distill", "distill.teacher=org/large", "distill.on_policy=0.5"],
        "distill.teacher_name": ["stage=distill", "distill.teacher=http://127.0.0.1:9"],
        "distill.vllm_url": [
            "stage=distill",
            "distill.teacher=org/large",
            "distill.on_policy=0.5",
            "distill.engine=vllm",
        ],
        "grpo": ["stage=grpo"],
        "grpo.vllm_url": ["stage=grpo", "grpo.engine=vllm"],
        **{
            f"grpo.rewards.{key}": ["stage=grpo", f"grpo.rewards=[{{name: {name}}}]"]
            for name, keys in (
                ("exact", "name weight field"),
                ("regex", "pattern"),
                ("length", "longest"),
                ("math", "seconds"),
                ("style.py:short", "convention"),
            )
            for key in keys.split()
        },
        "optim.rates": ["optim.rates=[{of: lora_B, lr: 0.003}]"],
        **{
            f"grpo.environment.{key}": ["stage=grpo", f"grpo.environment.name={name}"]
            for name, keys in (("tools.py:Own", "weight turns seconds"), ("http://127.0.0.1:9", "action observation"))
            for key in keys.split()
        },
        "ppo.critic_adapter": ["stage=ppo", "ppo.critic_adapter.kind=lora"],
        "ppo.kl_horizon": ["stage=ppo", "ppo.kl_target=6"],
        "ppo.vllm_url": ["stage=ppo", "ppo.engine=vllm"],
        "ppo.unsup_coef": ["stage=ppo"],
        "ppo.unsup_data": ["stage=ppo", "ppo.unsup_coef=1", f"ppo.unsup_data.path={train}"],
        "parallel.zero_stage": ["parallel.engine=deepspeed"],
    }
    own_files = ("model", "model.path", "model.revision", "data", "data.train", "data.train.path", "output")
    refused = ("data.eval.path", "data.eval.weight", "data.eval.epochs")  # a file of its own; what a mixture has
    companions = {
        "subset": "{group}=org/name",
        "revision": "{group}=org/name",
        "name": f"{{group}}={tmp_path}",
        "of": "{group}.take=1",
        "take": "{group}.of=[2, 4, 4]",
        "in_order": "{group}={{of: [2, 4, 4], take: 1}}",
        "adapter.initial_revision": "adapter.initial=org/name",
        "adapter.start_iterations": "adapter.start=pissa",
        "data.train.streaming": "data.max_samples=8",
        "optim.momentum": "optim.name=sgd",
        "tracking.name": "report_to=[wandb]",
        "checkpoint.best": "metrics.names=[exact_match]",
        "grpo.overlong_buffer": "grpo.overlong=penalise",
        "grpo.correction_low": "grpo.correction=token_mask",
        "grpo.correction_high": "grpo.correction=token_mask",
    }
    for key in itertools.filterfalse(lambda key: key.path in (*own_files, *refused), all_keys().values()):
        companion = companions.get(
            key.path,
            companions.get(key.name) if key.group.startswith("data.") or key.group.endswith(".share") else None,
        )
        first = next(
            (
                needed
                for name, needed in sorted(sections.items(), reverse=True)
                if f"{key.path}.".startswith(f"{name}.")
            ),
            [],
        )
        first = [*first, *([companion.format(group=key.group)] if companion else [])]
        assert faults(path, *first, override_of(key)) == [], key.path


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        GALLERY.parent.mkdir(exist_ok=True)
        GALLERY.write_text(gallery())


@pytest.mark.parametrize("entry", ["{wieght: 2}", "{name: exact, wieght: 2}", "{train: x.json, eval: 0.05}"])
def test_a_wrong_entry_of_a_list_of_rewards_is_a_fault(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "run.yaml"
    text = "stage: grpo\nmodel: a/b\ndata: {train: x.jsonl}\noutput: runs/x\n"
    path.write_text(f"{text}grpo:\n  rewards: [{entry}]\n")
    with pytest.raises(InputError) as caught:
        load_config(path)
    assert {fault.code for fault in caught.value.faults} <= {"SF-CONFIG-KEY", "SF-FILE-MISSING"}
    assert any(fault.where.startswith(f"{path}:6") for fault in caught.value.faults)


def test_a_misspelt_key_of_a_reward_is_told_its_name(tmp_path: Path) -> None:
    (fault,) = faults(write_config(tmp_path, stage="grpo", grpo="{rewards: [{name: exact, wieght: 2}]}"))
    assert "weight" in fault


def test_a_wrong_value_of_a_reward_is_told_what_its_key_takes(tmp_path: Path) -> None:
    (fault,) = faults(write_config(tmp_path, stage="grpo", grpo="{rewards: [{name: exact, weight: many}]}"))
    assert all_keys()["grpo.rewards.weight"].expected in fault
