"""Every recipe loads, plans for the machine that it names, and says in its comments what is so."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from helpers import zoo
from helpers.faults import raises_fault
from helpers.fork_server import ForkServer
from helpers.model_layouts import LLAMA2_7B, LLAMA31_8B, LLAMA32_1B, llama2_tokenizer, llama3_tokenizer
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.config.load import load_config
from surefoot.planning import memory
from surefoot.runs.make_plan import make_plan
from surefoot.system import hardware

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.name for path in RECIPES.iterdir())
SMOKE = "sft-smoke-cpu.yaml"
PLANNED = [name for name in NAMES if name != SMOKE]
ALPACA = [{"instruction": f"Say sky {count} times.", "input": "", "output": "sky " * count} for count in range(1, 13)]
CHATS = [{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": f"{n}"}]} for n in (1, 2)]
PHI3_MINI = LLAMA2_7B | {
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "vocab_size": 32064,
    "sliding_window": 2047,
}
TEACHER = "the teacher"
TEXTS = [{"text": "A heron stands still until a fish comes near. " * count} for count in range(1, 30)]
PAIRS = [{"prompt": f"Say sky {n} times.", "chosen": "sky " * n, "rejected": "heron"} for n in range(1, 41)]
JUDGED = [{"prompt": f"Say sky {n} times.", "completion": "sky " * n, "label": n % 3 > 0} for n in range(1, 41)]
TOOLS = [
    {
        "conversations": [
            {"from": "human", "value": f"What is {count} + 1?"},
            {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": count, "b": 1}})},
            {"from": "observation", "value": str(count + 1)},
            {"from": "gpt", "value": f"It is {count + 1}."},
        ],
        "tools": json.dumps([{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}]),
    }
    for count in range(40)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Hub id -> folder with the real config.json and a tokenizer of the real layout."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        "meta-llama/Llama-3.1-8B": llama3_tokenizer(folder / "llama3", pad=True),
        "meta-llama/Llama-3.1-8B-Instruct": llama3_tokenizer(folder / "instruct", pad=True, chat=True),
        "meta-llama/Llama-2-7b-hf": llama2_tokenizer(folder / "llama2"),
    }
    for name, path in found.items():
        (path / "config.json").write_text(json.dumps(LLAMA2_7B if "Llama-2" in name else LLAMA31_8B))
    layouts = {  # whose tokenizers are loaded
        "microsoft/Phi-3-mini-4k-instruct": (zoo.phi3, PHI3_MINI),
        "meta-llama/Llama-3.2-1B-Instruct": (zoo.llama3, LLAMA32_1B),
        TEACHER: (zoo.llama3, LLAMA31_8B),
    }
    for name, (make, config) in layouts.items():
        found[name] = make(folder / name.rpartition("/")[2])
        (found[name] / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working folder with the data files that recipes name."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "alpaca.json").write_text(json.dumps(ALPACA))
    files = {
        "preference": PAIRS,
        "judged": JUDGED,
        "chats": CHATS,
        "chats-heldout": CHATS,
        "tools": TOOLS,
        "texts": TEXTS,
        "questions": [{"prompt": f"What is {count} + 1?", "answer": count + 1} for count in range(40)],
    }
    for name, rows in files.items():
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shutil.copytree(RECIPES, tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(name: str) -> list[list[str]]:
    """The commands in a recipe's comments, as words."""
    text = (RECIPES / name).read_text(encoding="utf-8")
    return [shlex.split(line) for line in re.findall(r"^#\s+(surefoot .*)$", text, flags=re.MULTILINE)]


def plan(name: str, models: dict[str, Path], *overrides: str):
    """The plan for the machine that the recipe's own `surefoot plan` line names."""
    (words,) = [words for words in commands(name) if words[1] == "plan"]
    if name.startswith("ppo"):  # the reward model of another recipe; a server needs no memory here
        overrides = (*overrides, "ppo.reward=http://127.0.0.1:9/scores")
    config = load_config(Path("recipes") / name, overrides).config
    places = [f"model={models[config.model.path]}"]
    if config.distill.teacher:  # the same hub id as of another recipe's model, with a tokenizer that can be loaded
        places.append(f"distill.teacher={models[TEACHER]}")
    located = load_config(Path("recipes") / name, [*overrides, *places]).config
    return make_plan(located, hardware=hardware.preset(words[words.index("--hardware") + 1]))


def test_names_say_stage_model_and_adapter():
    assert NAMES
    for name in NAMES:
        assert re.fullmatch(
            r"(sft|pretrain|reward|dpo|kto|ppo|grpo|distill)-[a-z0-9-]+-(full|lora|dora|cpu)\.yaml", name
        )


@pytest.mark.parametrize("name", NAMES)
def test_its_commands_name_itself(name):
    words = commands(name)
    assert [command for _, command, *_ in words] == (["train"] if name == SMOKE else ["plan", "train"])
    assert all(command[2] == f"recipes/{name}" for command in words)


@pytest.mark.parametrize("name", PLANNED)
def test_it_plans_and_fits_without_a_caution(name, workplace, models):
    made = plan(name, models)
    assert memory.fits(made.memory)
    assert made.cautions == ()
    assert made.precision.trainable.value == "fp32"
    kind = "full" if made.adapter is None else made.adapter.kind.value
    assert name.endswith(f"-{kind}.yaml")


@pytest.mark.parametrize("name", PLANNED)
def test_its_output_folder_has_its_name(name, workplace):
    assert load_config(Path("recipes") / name).config.output == f"runs/{name.removesuffix('.yaml')}"


def test_the_dora_recipe_is_the_run_that_broke_elsewhere(workplace, models):
    config = load_config("recipes/sft-llama3-8b-dora.yaml").config
    made = plan("sft-llama3-8b-dora.yaml", models)
    assert (made.adapter.rank, made.adapter.alpha, config.optim.lr, config.batch.size) == (32, 64, 3e-5, 128)
    assert str(config.duration) == "3 epochs"
    assert len(made.adapter.targets.value) == 7 * 32
    assert made.tokenizer.pad_token.value == "<|finetune_right_pad_id|>"
    assert "cudnn" not in made.attention.kernels.value
    assert made.precision.base.value == "bf16"


def test_the_bos_recipe_is_the_experiment_as_it_was_published(workplace, models):
    config = load_config("recipes/sft-phi3-bos-lora.yaml").config
    made = plan("sft-phi3-bos-lora.yaml", models)
    assert (made.adapter.rank, made.adapter.alpha, made.adapter.dropout) == (16, 32, 0.1)
    assert (made.batch.micro.value, made.batch.accumulation) == (2, 4)
    assert (config.optim.lr, config.optim.schedule, config.optim.warmup) == (5e-4, "cosine", 0)
    assert (config.log_every, str(config.checkpoint.every), str(config.duration)) == (10, "500 steps", "3 epochs")
    assert len(made.adapter.targets.value) == 4 * 32
    assert (made.precision.compute.value, made.tokenizer.bos_scale.value) == ("bf16", 0.1)
    assert made.tokenizer.bos.value is True
    other = plan("sft-phi3-bos-lora.yaml", models, "bos.scale=1")  # twin: Phi-3's template puts none there
    assert (other.tokenizer.bos.value, other.tokenizer.bos_scale.value) == (False, 1.0)


def test_what_the_comments_say_of_memory(workplace, models):
    assert plan("sft-llama3-8b-lora.yaml", models).batch.micro.value == 1
    wide = load_config("recipes/sft-llama3-8b-lora.yaml", [f"model={models['meta-llama/Llama-3.1-8B']}"]).config
    assert make_plan(wide, hardware=hardware.preset("h100")).batch.micro.value >= 8
    full = plan("sft-llama2-7b-full.yaml", models)
    assert round(16 * full.parameters / hardware.GIB) == 100
    assert round(12 * full.parameters / hardware.GIB) == 75  # fp32 weights and two moments


def test_twin_a_recipe_that_does_not_fit_or_is_misspelt_is_noticed(workplace, models):
    with raises_fault("SF-MEMORY", "model"):
        plan("sft-llama3-8b-dora.yaml", models, "adapter=null")
    with raises_fault("SF-CONFIG-KEY", "override adapter.rnak=32", remedy=["rank"]):
        plan("sft-llama3-8b-dora.yaml", models, "adapter.rnak=32")
    assert not memory.fits(
        plan("sft-llama2-7b-full.yaml", models, "batch.micro=8", "gradient_checkpointing=off").memory
    )


def test_the_smoke_recipe_runs_on_a_small_model(workplace):
    tiny_llama(workplace / "models" / "small-llama")
    with ForkServer() as server:
        log = workplace / "log.txt"
        assert server.run(["train", f"recipes/{SMOKE}"], log) == 0, log.read_text()
        assert server.run(["verify", "runs/sft-smoke-cpu"], log) == 0, log.read_text()
    rows = [json.loads(line) for line in (workplace / "runs/sft-smoke-cpu/trainer_log.jsonl").read_text().splitlines()]
    assert [row["current_steps"] for row in rows] == list(range(1, 21))
    assert all(row["loss"] is not None for row in rows)


RUNS = [
    ("sft-llama3-8b-tools-lora.yaml", ["precision=fp32"]),
    ("pretrain-llama3-8b-lora.yaml", []),
    ("reward-llama3-8b-lora.yaml", []),
    ("dpo-llama3-8b-lora.yaml", ["samples.count=0"]),
    ("kto-llama3-8b-lora.yaml", ["samples.count=0"]),
    ("sft-llama3-8b-pairs-lora.yaml", []),
    ("distill-llama3-1b-lora.yaml", ["distill.teacher=models/small-llama", "samples.count=0"]),
]


@pytest.mark.parametrize(("name", "kept"), representatives(RUNS, RUNS[0], RUNS[3]))
def test_recipes_of_mixtures_and_texts_run_on_a_small_model(name, kept, workplace):
    """Two steps; the base in fp32 where the recipe holds it in 4 bits, which narrow layers do not take."""
    tiny_llama(workplace / "models" / "small-llama")
    small = ["model=models/small-llama", "duration=2 steps", "data.max_length=512", "batch.size=4", "adapter.rank=4"]
    evaluation = ["metrics.max_new_tokens=4"] if name == "sft-llama3-8b-tools-lora.yaml" else []
    with ForkServer() as server:
        log = workplace / "log.txt"
        assert server.run(["train", f"recipes/{name}", *small, *kept, *evaluation, "data.eval=4"], log) == 0, (
            log.read_text()
        )
    said = log.read_text()
    assert "done: 2 steps" in said
    assert ("exact match" in said) == bool(evaluation)
