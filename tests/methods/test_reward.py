"""Reward models as whole runs: they learn to rank, resume bit for bit, open again, and refuse what they cannot do."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers import zoo
from helpers.model_layouts import run_config
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.commands.push import pushed_files
from surefoot.evaluate.reward import measure_reward, reward_to_json
from surefoot.methods import reward as stage_reward
from surefoot.methods.open_model import open_for_use
from surefoot.methods.open_reward import open_reward
from surefoot.methods.requests import DataRequest
from surefoot.methods.reward import Ranking, evaluated_ranking
from surefoot.models.load import load_model
from surefoot.models.value_head import VALUE_HEAD_FILE, ValueHead
from surefoot.report.console import Console
from surefoot.report.intervals import wilson
from surefoot.runs.export.model import export_model
from surefoot.runs.make_plan import make_plan
from surefoot.runs.run import train_run
from surefoot.runs.run_folder import Mode
from surefoot.system.errors import EnvironmentFault, InputError

GOOD, BAD = ("good", "kind", "calm"), ("bad", "cruel", "loud")
LORA, DORA = {"kind": "lora", "rank": 8, "alpha": 16}, {"kind": "dora", "rank": 8, "alpha": 16}
# The same weights in another forward pass (no padding, or merged): fp32, some hundred operations.
FP32 = 1e-5


def rows(count: int, start: int = 0) -> str:
    """Which answer is better can be told from one word."""
    birds = ("heron", "moth", "fern", "trout", "pine")
    found = [
        {
            "prompt": f"Say {n} words about the {birds[n % 5]}.",
            "chosen": f"The {birds[n % 5]} is {GOOD[n % 3]} and {GOOD[n * 7 % 3]}.",
            "rejected": f"The {birds[n % 5]} is {BAD[n % 3]}{' and ' + BAD[n * 5 % 3] if n % 2 else ''}.",
        }
        for n in range(start, start + count)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in found)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    (folder / "pairs.jsonl").write_text(rows(64))
    (folder / "held.jsonl").write_text(rows(24, start=64))
    tiny_llama(folder / "llama", hidden=64)
    zoo.opt(folder / "opt", word_embed_proj_dim=16, do_layer_norm_before=False)
    return folder


def config(workplace, output, **changes):
    given = {
        "stage": "reward",
        "model": str(workplace / "llama"),
        "adapter": LORA,
        "data": {
            "train": str(workplace / "pairs.jsonl"),
            "eval": str(workplace / "held.jsonl"),
            "template": "plain",
            "max_length": 96,
        },
        "optim": {"lr": 5e-3, "warmup": 0.0},
        "batch": {"size": 16, "micro": 8},
        "duration": "12 steps",
        "eval_every": "6 steps",
        "checkpoint": {"every": "6 steps", "keep": 2},
        "output": str(output),
    }
    return run_config(**(given | changes))


def train(config, mode: Mode = "new"):
    screen = io.StringIO()
    assert train_run(config, mode, Console(screen)) == 0
    return screen.getvalue()


@pytest.fixture(scope="module")
def runs(workplace):
    """Kind -> run folder; each is made once."""
    ways = {
        "lora": {},
        "dora": {"adapter": DORA},
        "full": {"adapter": None, "optim": {"lr": 1e-3, "warmup": 0.0, "weight_decay": 0.1}},
        "opt": {
            "model": str(workplace / "opt"),
            "reward": {"loss": "divergence"},
            "optim": {"lr": 2e-2, "warmup": 0.1},
            "duration": "24 steps",
        },
    }
    done: dict[str, object] = {}

    def get(kind):
        if kind not in done:
            done[kind] = workplace / f"run-{kind}"
            train(config(workplace, done[kind], **ways[kind]))
        return done[kind]

    return get


def results(run):
    return json.loads((run / "all_results.json").read_text())


@pytest.mark.parametrize("kind", representatives(["lora", "dora", "full", "opt"], "lora", "full"))
def test_it_learns_to_rank_and_opens_with_the_same_numbers(workplace, runs, kind):
    run = runs(kind)
    found = results(run)
    assert found["eval_reward_accuracy"] > 0.9
    opened = open_reward(str(run))
    assert not opened.model.training
    assert opened.model.v_head.summary.weight.dtype == torch.float32
    measured = measure_reward(opened, DataRequest(str(workplace / "held.jsonl")))
    assert measured.report.loss == pytest.approx(found["eval_loss"], rel=FP32)
    assert measured.report.metrics["reward_accuracy"] == found["eval_reward_accuracy"]
    assert measured.report.weight == 24
    told = reward_to_json(measured)
    assert told["loss"]["kind"] == ("divergence" if kind == "opt" else "last")
    assert sum(one["share"] for one in told["calibration"]["bins"]) == pytest.approx(1)
    verified = json.loads((run / "plan.json").read_text())["verified"]
    width = 16 if kind == "opt" else 64
    assert verified["value_head"] == {"parameters": width, "dtypes": ["float32"]}
    assert not opened.model.v_head.summary.bias.any()  # no difference of scores has it
    head = ValueHead(width)  # twin: an untrained head ranks nothing
    opened.model.v_head.load_state_dict(head.state_dict())
    assert measure_reward(opened, DataRequest(str(workplace / "held.jsonl"))).report.metrics["reward_accuracy"] == 0.5


@pytest.mark.parametrize("kind", representatives(["lora", "full"], "lora"))
def test_resumed_it_ends_with_the_same_bytes(workplace, runs, kind):
    straight, again = runs(kind), workplace / f"again-{kind}"
    shutil.copytree(straight, again)
    for name in ("MANIFEST.json", "all_results.json"):
        (again / name).unlink()
    shutil.rmtree(again / "checkpoint-12")
    (again / VALUE_HEAD_FILE).unlink()
    given = {"adapter": None, "optim": {"lr": 1e-3, "warmup": 0.0, "weight_decay": 0.1}} if kind == "full" else {}
    train(config(workplace, again, **given), "resume")
    names = sorted(path.name for path in (straight / "checkpoint-12").glob("*.safetensors"))
    assert VALUE_HEAD_FILE in names
    for name in names:
        assert (again / "checkpoint-12" / name).read_bytes() == (straight / "checkpoint-12" / name).read_bytes(), name
    first = (straight / "checkpoint-6" / VALUE_HEAD_FILE).read_bytes()
    assert (straight / "checkpoint-12" / VALUE_HEAD_FILE).read_bytes() != first  # twin: it did move in between


def test_the_output_head_stays_as_it_was_and_weight_decay_does_not_touch_it(workplace, runs):
    def weights(folder):
        model = load_model(folder, dtype=torch.float32, attention_implementation="sdpa", device=torch.device("cpu"))
        return dict(model.named_parameters())

    before, after = weights(workplace / "llama"), weights(runs("full"))
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == ["lm_head.weight"]  # twin: all else trained
    plan = make_plan(config(workplace, workplace / "none", adapter=None))
    assert plan.reward is not None
    assert plan.reward.frozen == before["lm_head.weight"].numel() == plan.parameters - plan.trainable


def test_a_head_that_differs_from_the_plan_is_noticed(workplace, monkeypatch):
    class Wider(ValueHead):
        def __init__(self, width):
            super().__init__(width)
            self.more = torch.nn.Parameter(torch.zeros(3))

    monkeypatch.setattr(stage_reward, "ValueHead", Wider)
    with pytest.raises(EnvironmentFault) as caught:
        train(config(workplace, workplace / "wider"))
    assert (caught.value.faults[0].code, caught.value.faults[0].where) == ("SF-PLAN-BROKEN", "plan: value head")


def test_it_starts_from_the_head_of_another_reward_model(workplace, runs):
    first = runs("lora")
    output = workplace / "started"
    given = {"duration": "1 step", "eval_every": "1 step", "optim": {"lr": 1e-9, "warmup": 0.0}}
    train(config(workplace, output, reward={"init": str(first)}, **given))
    old, new = (open_reward(str(run)).model.v_head.summary.weight for run in (first, output))
    assert torch.allclose(old, new, atol=1e-6)
    assert old.any()
    with pytest.raises(InputError) as caught:
        train(config(workplace, workplace / "none", reward={"init": str(workplace / "llama")}, **given))
    assert caught.value.faults[0].code == "SF-MODEL-KIND"


def as_classifier(run, folder):
    """The full run as transformers' own class writes it."""
    model = AutoModelForCausalLM.from_pretrained(run)
    settings = AutoConfig.from_pretrained(run, num_labels=1)
    classifier = AutoModelForSequenceClassification.from_config(settings)
    head = open_reward(str(run)).model.v_head
    decoder = {name: one for name, one in model.state_dict().items() if not name.startswith("lm_head.")}
    classifier.load_state_dict(decoder | {"score.weight": head.summary.weight.detach()})
    classifier.save_pretrained(folder)
    for path in run.glob("*token*"):
        shutil.copy(path, folder)


def as_deepspeed_chat(run, folder):
    """Its names, in safetensors."""
    from safetensors.torch import save_file

    model = AutoModelForCausalLM.from_pretrained(run)
    tensors = {
        f"rwtransformer.{name.removeprefix('model.')}": one.contiguous()
        for name, one in model.state_dict().items()
        if not name.startswith("lm_head.")
    }
    tensors["v_head.weight"] = open_reward(str(run)).model.v_head.summary.weight.detach()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for path in [run / "config.json", *run.glob("*token*")]:
        shutil.copy(path, folder)


@pytest.mark.parametrize("written", [as_classifier, as_deepspeed_chat])
def test_reward_models_of_other_tools_open_with_the_same_scores(workplace, runs, written):
    run = runs("full")
    folder = workplace / written.__name__
    written(run, folder)
    asked = DataRequest(str(workplace / "held.jsonl"), template="plain", max_length=96)
    ours, theirs = (measure_reward(open_reward(str(one)), asked).report for one in (run, folder))
    assert theirs.metrics["reward_margin"] == pytest.approx(ours.metrics["reward_margin"], rel=FP32)
    assert theirs.metrics["reward_chosen"] == pytest.approx(ours.metrics["reward_chosen"], rel=FP32)


def test_a_merged_adapter_scores_as_the_adapter_over_its_base(workplace, runs):
    run = workplace / "merged"
    train(config(workplace, run, adapter={**LORA, "publish": "merged"}))
    asked = DataRequest(str(workplace / "held.jsonl"))
    merged, apart = (measure_reward(open_reward(str(one)), asked).report for one in (run, runs("lora")))
    assert not (run / "adapter_config.json").exists()
    assert merged.metrics["reward_margin"] == pytest.approx(apart.metrics["reward_margin"], rel=1e-4)


@pytest.mark.parametrize("merge", representatives([True, False], True))
def test_an_export_keeps_the_head_and_the_scores(workplace, runs, merge):
    out = workplace / f"exported-{merge}"
    export_model(str(runs("lora")), out, merge=merge)
    asked = DataRequest(str(workplace / "held.jsonl"), template="plain", max_length=96)
    found, own = (measure_reward(open_reward(str(one)), asked).report for one in (out, runs("lora")))
    assert found.metrics["reward_margin"] == pytest.approx(own.metrics["reward_margin"], rel=1e-4)
    assert not (out / "Modelfile").exists()
    with pytest.raises(InputError) as caught:
        export_model(str(runs("full")), workplace / "gguf", gguf=True)
    assert caught.value.faults[0].code == "SF-EXPORT"


def test_all_of_a_reward_model_goes_to_the_hub(runs):
    names = {upload.name for upload in pushed_files(runs("full"))}
    assert {"model.safetensors", VALUE_HEAD_FILE, "README.md"} <= names


def test_what_is_no_reward_model_and_what_answers_no_prompt(workplace, runs):
    for refused, path in ((open_reward, workplace / "llama"), (open_for_use, runs("lora"))):
        with pytest.raises(InputError) as caught:
            refused(str(path))
        assert (caught.value.faults[0].code, caught.value.faults[0].where) == ("SF-MODEL-KIND", str(path))
    assert open_for_use(str(runs("lora")), scored=True).model is not None  # norms and captures may look into it


def test_the_card_scores_as_we_do(workplace, runs, monkeypatch, capsys):
    for kind in ("lora", "full"):
        run = runs(kind)
        text = (run / "README.md").read_text()
        code = text.partition("```python\n")[2].partition("```")[0]
        assert code
        assert "reward modeling" in text
        monkeypatch.chdir(run)
        exec(code.replace("'llama'", repr(str(workplace / "llama"))), {})
        printed = float(capsys.readouterr().out.splitlines()[-1])
        answers = (
            '{"prompt": "Give three tips for staying healthy.", "chosen": "Sleep, move and eat well.", "rejected": "x"}'
        )
        (workplace / "card.jsonl").write_text(answers)
        found = measure_reward(open_reward(str(run)), DataRequest(str(workplace / "card.jsonl"))).report
        assert found.metrics["reward_chosen"] == pytest.approx(printed, rel=1e-4)


def test_identical_answers_first_token_differences_and_long_prompts(workplace, tmp_path):
    odd = [
        {"prompt": "Say a word.", "chosen": "same", "rejected": "same"},
        {"prompt": "Say a word.", "chosen": "!good", "rejected": "?bad"},
        {"prompt": "Say " + "many " * 200 + "words.", "chosen": "The moth is good.", "rejected": "The moth is bad."},
    ]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in odd * 4))
    for loss in ("last", "divergence"):
        given = config(
            workplace,
            tmp_path / loss,
            data={"train": str(path), "template": "plain", "max_length": 64},
            reward={"loss": loss, "center": 0.01},
            tokenizer={"pad": "<|end_of_text|>"},  # PAD = EOS
            batch={"size": 4, "micro": 2},
            duration="4 steps",
            eval_every=None,
        )
        train(given)
        logged = [json.loads(line) for line in (tmp_path / loss / "trainer_log.jsonl").read_text().splitlines()]
        assert all(row["loss"] is not None and row["loss"] > 0 for row in logged if "loss" in row)


Z = 1.959964


@pytest.mark.parametrize(("share", "count"), [(0.48, 200), (0.0, 4), (1.0, 10), (0.75, 6)])
def test_the_interval_is_where_the_share_is_as_far_off_as_chance_goes(share, count):
    """Wilson's bounds are the roots of (p - x)² = z² x (1 - x) / n."""
    wide = Z**2 / count
    roots = np.sort(np.roots([1 + wide, -2 * share - wide, share**2]))
    assert wilson(share, count) == pytest.approx(roots, abs=1e-9)
    assert wilson(share, 2 * count) != pytest.approx(roots, abs=1e-3)  # twin


@pytest.mark.parametrize(
    ("accuracy", "pairs", "worth"),
    [
        (0.48, 200, False),
        (0.6, 100_000, False),
        (0.61, 100_000, True),
        (0.61, 50, False),
        (0.7, 10, False),
        (1, 10, True),
    ],
)
def test_what_is_poor_or_may_be_chance_is_a_caution(accuracy, pairs, worth):
    ranking = Ranking(accuracy, pairs)
    assert (ranking.caution is None) == worth
    low, high = ranking.interval
    assert worth or all(number in str(ranking.caution) for number in (f"{accuracy:.1%}", f"{low:.1%}", f"{high:.1%}"))


def test_results_without_pairs_tell_nothing():
    assert evaluated_ranking({"eval_reward_accuracy": 0.7, "eval_pairs": 20}) == Ranking(0.7, 20)
    assert evaluated_ranking({"eval_reward_accuracy": None, "eval_pairs": 20}) is None
    assert evaluated_ranking({"eval_reward_accuracy": 0.7, "eval_answers": 20}) is None  # of stage kto
    assert evaluated_ranking({"train_loss": 0.7}) is None
