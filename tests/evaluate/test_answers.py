"""`surefoot evaluate answers`: the numbers that a run logged, intervals that hold, and the best answers as data."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from transformers import AutoTokenizer

import surefoot
from helpers.faults import prints_fault
from helpers.killed import Killed
from helpers.tiny_models import curt, tiny_judge
from surefoot.commands.main import main
from surefoot.data.prepare import PreparedData
from surefoot.evaluate.answers import pair_records
from surefoot.methods import examples
from surefoot.report.intervals import mean_interval, wilson
from surefoot.system import durable

RATIO = 1e-6  # of fp32 sums in batches of other shapes
OWN = """
def some(prompts, responses, answer):
    assert all(f"number {one}." in prompt for one, prompt in zip(answer, prompts))
    return [{"score": (len(text) % 3 == 0) * (1 + len(text) / 64), "reason": text[:3]} for text in responses]

class Asks:
    def reset(self, record):
        self.record = record
    def step(self, answer):
        if len(answer) % 2:
            return "Go on."
        return {"reward": float(len(answer) % 3 == 0), "done": True}
"""


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["evaluate", "answers", *map(str, words)])


def found(*words: object) -> dict[str, Any]:
    result = call(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    curt(folder / "base")
    tiny_judge(folder / "judge")
    (folder / "own.py").write_text(OWN)
    rows = [{"prompt": f"Say number {n}.", "answer": str(n)} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(world: Path, output: str, **grpo: Any) -> dict[str, Any]:
    return {
        "stage": "grpo",
        "model": str(world / "base"),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(world / "prompts.jsonl"), "eval": 5, "max_length": 96},
        "grpo": {
            "rewards": [f"{world / 'own.py'}:some", {"name": f"{world}/judge", "weight": 1e-3}],
            "max_new_tokens": 24,
            "group": 4,
            "eval_answers": 6,
            "eval_passes": 0.5,
            **grpo,
        },
        "batch": {"size": 8, "micro": 3},
        "optim": {"lr": 1e-2},
        "precision": "fp32",
        "duration": "2 steps",
        "output": str(world / output),
    }


def trained(world: Path, config: dict[str, Any]) -> tuple[Path, dict[str, float]]:
    """The run, and what it measured at its end."""
    surefoot.train(config, stream=io.StringIO())
    return Path(config["output"]), json.loads((world / config["output"] / "all_results.json").read_text())


@pytest.fixture(scope="module")
def run(world) -> tuple[Path, dict[str, float]]:
    return trained(world, config_of(world, "run"))


def test_a_run_has_the_numbers_that_it_logged(run):
    folder, logged = run
    asked = found(folder)
    side = asked["results"]["adapter"]
    assert [*asked["results"]] == ["base", "adapter"]
    assert {f"eval_pass_at_{k}": one["value"] for k, one in side["pass_at"].items()} == {
        name: value for name, value in logged.items() if name.startswith("eval_pass_at_")
    }
    for name in ("reward", "reward_some", "reward_judge", "response_length", "ended"):
        assert side[name] == pytest.approx(logged[f"eval_{name}"], rel=RATIO), name
    assert 0 < side["pass_at"]["1"]["value"] < 1
    assert all(low < one["value"] < high for one in side["pass_at"].values() for low, high in [one["interval"]])
    assert found(folder)["results"]["adapter"]["pass_at"] == side["pass_at"]
    other = found(folder, "--seed", 7, "--only", "adapter")["results"]
    assert [*other] == ["adapter"]
    assert other["adapter"]["pass_at"] != side["pass_at"]  # twin: other draws are others
    assert other["adapter"]["reward"] == side["reward"]  # of greedy answers


@pytest.mark.parametrize("passed", [True, False])
def test_a_reward_that_a_python_caller_passed_is_not_forgotten(world, passed):
    """It may read any field of the data; it is in no config, so later commands do not have it."""
    config = config_of(world, f"passed-{passed}", rewards=[{"name": "length", "longest": 8}], control="random") | {
        "duration": "1 steps"
    }
    config["data"] |= {"eval": 2}
    surefoot.train(config, stream=io.StringIO(), **({"reward": short} if passed else {}))
    run = Path(config["output"])
    audit = json.loads((run / "data.json").read_text())["train"]
    told = call(run, "--only", "adapter", "--answers", 1, "--max-samples", 1).stderr.count("caution: ")
    html = (run / "report.html").read_text()
    assert (audit["unused_fields"], told, "reward=…" in html) == (([], 1, True) if passed else (["answer"], 0, False))


def short(prompts, responses, answer):
    return [len(text) / 64 for text in responses]


def test_an_environment_is_asked_as_in_the_run(world, tmp_path):
    environment = {"name": f"{world / 'own.py'}:Asks", "turns": 3}
    config = config_of(world, "talks", rewards=[], environment=environment, max_new_tokens=64)
    config["data"]["max_length"] = 128
    folder, logged = trained(world, config)
    side = found(folder, "--only", "adapter", "--out", tmp_path)["results"]["adapter"]
    assert {f"eval_pass_at_{k}": one["value"] for k, one in side["pass_at"].items()}.items() <= logged.items()
    assert side["pass_at"]["6"]["value"] > 0
    assert any(len(one.get("turns", ())) > 1 for one in lines(tmp_path / "answers.jsonl"))
    result = call(folder, "--best", "--out", tmp_path / "best")
    assert prints_fault(result.stderr, "SF-USE-FLAG", "--best")
    assert not (tmp_path / "best").exists()


@pytest.fixture(scope="module")
def grpo_yaml(world) -> Path:
    """For models that are no run of stage grpo."""
    config = config_of(world, "unused", rewards=[f"{world / 'own.py'}:some"], temperature=0.7)
    path = world / "grpo.yaml"
    path.write_text(json.dumps(config | {"model": "not/used"}))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


HELLO = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]
RECORDS = {
    "messages": [
        {"prompt": "Say number 0.", "answer": "0"},
        {"messages": [*HELLO, {"role": "user", "content": "Say number 1."}], "answer": "1"},
    ],
    "instructions": [
        {"instruction": "Count:", "input": "Say number 0.", "answer": "0"},
        {"instruction": "Say number 1.", "input": "", "answer": "1"},
    ],
}


@pytest.mark.parametrize("kind", RECORDS)
def test_the_best_answers_of_a_base_are_what_stage_sft_learns(world, grpo_yaml, tmp_path, monkeypatch, kind):
    """The prompt's ids are those that were answered, and only the answer is learned."""
    template = {"messages": "auto", "instructions": "alpaca"}[kind]
    config = json.loads(grpo_yaml.read_text())
    config["data"] |= {"template": template, "max_length": 480}
    out, data, asks = tmp_path / "out", tmp_path / "rows.jsonl", tmp_path / "grpo.yaml"
    asks.write_text(json.dumps(config))
    data.write_text("".join(json.dumps(row) + "\n" for row in RECORDS[kind] * 5))
    words = [world / "base", data, "--config", asks, "--answers", 16, "--out", out, "--best", "--pairs"]
    prepared: list[PreparedData] = []
    real = examples.prepare_data

    def spied(*given: Any, **named: Any) -> PreparedData:
        prepared.append(real(*given, **named))
        return prepared[-1]

    monkeypatch.setattr(examples, "prepare_data", spied)
    asked = found(*words)
    drawn, best = lines(out / "answers.jsonl"), lines(out / "best.jsonl")
    assert len(drawn) == 16 * 10
    passed = [
        [one for one in drawn[place : place + 16] if one["ended"] and one["answer"].strip() and one["score"] >= 0.5]
        for place in range(0, len(drawn), 16)
    ]
    chosen = [(place, max(own, key=lambda one: one["score"])) for place, own in enumerate(passed) if own]
    assert any(one is not own[0] for (_, one), own in zip(chosen, filter(None, passed), strict=True))
    assert asked["best"] == len(best) == len(chosen) > 3
    assert {place % 2 for place, _ in chosen} == {0, 1}
    assert [one["rewards"]["some"]["reason"] for one in best] == [one["answer"][:3] for _, one in chosen]

    sft = {
        "stage": "sft",
        "model": str(world / "base"),
        "data": {"train": str(out / "best.jsonl"), "max_length": 480, "template": template},
        "duration": "1 steps",
        "output": str(tmp_path / "sft"),
    }
    surefoot.train(sft, stream=io.StringIO())
    prompts, learned = prepared[0].train, prepared[-1].train
    decode = AutoTokenizer.from_pretrained(world / "base").decode
    assert len(learned) == len(chosen)
    for number, (place, one) in enumerate(chosen):
        example, size = learned[number], prompts.length(place)
        assert example.ids[:size].tolist() == prompts[place].ids.tolist()
        assert example.supervised.tolist() == [False] * size + [True] * (len(example.ids) - size)
        assert decode(example.ids[size:], skip_special_tokens=True) == one["answer"]

    pairs = lines(out / "pairs.jsonl")
    fit = [
        [one for one in drawn[place : place + 16] if one["ended"] and one["answer"].strip()]
        for place in range(0, len(drawn), 16)
    ]
    wanted = [(max(own, key=score), min(own, key=score)) for own in fit if len({score(one) for one in own}) > 1]
    assert asked["pairs"] == len(pairs) == len(wanted) > 3
    assert [(one["score_chosen"], one["score_rejected"]) for one in pairs] == [tuple(map(score, one)) for one in wanted]
    dpo = {**sft, "stage": "dpo", "data": {**sft["data"], "train": str(out / "pairs.jsonl")}}
    surefoot.train({**dpo, "output": str(tmp_path / "dpo")}, stream=io.StringIO())
    learned = prepared[-1].train
    answers = [decode(one.ids[one.supervised], skip_special_tokens=True) for one in map(learned.__getitem__, range(4))]
    trimmed = [one["answer"].strip() for pair in wanted[:2] for one in pair]  # as Llama 3's template does
    assert [one.strip() for one in answers] == trimmed


def score(answer: dict[str, Any]) -> float:
    return answer["score"]


def test_a_pair_has_two_texts_whatever_scores_one_text_has() -> None:
    class Prompts(list):
        def record(self, place: int) -> dict[str, str]:
            return self[place]

        def shown(self, place: int) -> tuple[()]:
            return ()

    def pairs(*drawn: tuple[str, float]) -> list[tuple[str, str]]:
        kept = [{"ended": True, "answer": text, "score": value} for text, value in drawn]
        results = {"base": SimpleNamespace(sizes=[len(kept)], kept=kept)}
        measured: Any = SimpleNamespace(results=results, prompts=Prompts([{"instruction": "q"}]))
        return [(one["chosen"], one["rejected"]) for one in pair_records(measured)]

    assert pairs(("one", 1.0), (" one", 0.1)) == []
    assert pairs(("one", 1.0), ("one", 0.1), ("two", 0.5)) == [("one", "two")]
    assert pairs(("one", 1.0), ("two", 0.1), ("one", 0.5)) == [("one", "two")]  # the twin: another text is the worst


def test_a_single_answer_makes_no_pair(world, grpo_yaml, tmp_path):
    words = [world / "base", "--config", grpo_yaml, "--max-samples", 1, "--out", tmp_path / "out", "--pairs"]
    assert prints_fault(call(*words, "--answers", 1).stderr, "SF-USE-FLAG", "--pairs")
    assert not (tmp_path / "out").exists()
    assert found(*words, "--answers", 2)["pairs"] in (0, 1)  # the twin


@pytest.mark.parametrize("held_out", [False, True])
def test_records_that_a_function_reads_are_refused_before_a_model_is_opened(
    world, grpo_yaml, tmp_path, monkeypatch, held_out
):
    def opens(*given: Any) -> None:
        raise Killed

    monkeypatch.setattr("surefoot.methods.open_model.open_for_use", opens)
    config = json.loads(grpo_yaml.read_text()) | {"functions": {"record": f"{world / 'own.py'}:prompt"}}
    source = {"path": str(world / "prompts.jsonl"), "format": "custom"}
    config["data"]["eval" if held_out else "train"] = [*([] if held_out else [config["data"]["train"]]), source]
    path = tmp_path / "custom.yaml"
    path.write_text(json.dumps(config))
    words = [world / "base", "--config", path, "--out", tmp_path / "out"]
    for flag in ("--best", "--pairs"):
        assert prints_fault(call(*words, flag).stderr, "SF-USE-FLAG", flag)
    with pytest.raises(Killed):  # twins: all answers alone, and other records
        call(*words)
    with pytest.raises(Killed):
        call(*words[:1], world / "prompts.jsonl", *words[1:], "--best")


def test_the_same_request_writes_the_same_bytes_and_nothing_else_is_replaced(world, grpo_yaml, tmp_path):
    words = [world / "base", "--config", grpo_yaml, "--answers", 2, "--max-samples", 3, "--out", tmp_path, "--best"]
    asked = found(*words)
    assert asked["data"]["prompts"] == 3
    before = (tmp_path / "answers.jsonl").read_bytes()
    assert len(before.splitlines()) == 6
    found(*words)
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    assert prints_fault(call(*words, "--seed", 3).stderr, "SF-USE-OUTPUT", tmp_path / "answers.json")
    found(*words, "--seed", 3, "--overwrite")
    assert (tmp_path / "answers.jsonl").read_bytes() != before
    found(*words[:-1], "--seed", 3, "--overwrite")  # without --best
    assert not (tmp_path / "best.jsonl").exists()
    found(*words, "--seed", 3, "--overwrite")
    (tmp_path / "best.jsonl").write_text("worked on\n")
    assert prints_fault(call(*words, "--seed", 3, "--overwrite").stderr, "SF-USE-OUTPUT", tmp_path / "best.jsonl")
    assert (tmp_path / "best.jsonl").read_text() == "worked on\n"


@pytest.mark.parametrize("removes", [True, False])
def test_killed_before_its_answers_are_written_it_can_be_asked_again(world, grpo_yaml, tmp_path, monkeypatch, removes):
    """The twin leaves the answers of the request before beside the findings of the new one."""
    words = [world / "base", "--config", grpo_yaml, "--answers", 2, "--max-samples", 3, "--out", tmp_path]
    found(*words)

    real = durable.write_bytes

    def dies(path, content):
        if path.name == "answers.jsonl":
            raise Killed
        real(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(durable, "write_bytes", dies)
        if not removes:
            patched.setattr("surefoot.system.folders.own_files", lambda file: [])
        with pytest.raises(Killed):
            CliRunner().invoke(main, ["evaluate", "answers", *map(str, words), "--seed", "3", "--overwrite"])
    again = call(*words, "--seed", 4, "--overwrite")
    assert (again.exit_code == 0) == removes
    assert removes or prints_fault(again.stderr, "SF-USE-OUTPUT", tmp_path / "answers.jsonl")


def test_what_is_missing_is_told_before_a_model_is_loaded(world, run, grpo_yaml, tmp_path):
    assert prints_fault(call(world / "base", world / "prompts.jsonl").stderr, "SF-USE-FLAG", "--config")
    config = json.loads(grpo_yaml.read_text())
    config["data"]["eval"] = "none"
    (tmp_path / "other.yaml").write_text(json.dumps(config))
    assert prints_fault(call(world / "base", "--config", tmp_path / "other.yaml").stderr, "SF-USE-FLAG", "DATA")
    (tmp_path / "sft.yaml").write_text(
        json.dumps({key: config[key] for key in ("model", "data", "output")} | {"stage": "sft"})
    )
    assert prints_fault(call(world / "base", "--config", tmp_path / "sft.yaml").stderr, "SF-USE-FLAG", "--config")
    assert call(run[0], "--best").exit_code == 2
    config["grpo"]["rewards"] = []
    (tmp_path / "none.yaml").write_text(json.dumps(config))
    result = call(world / "base", world / "prompts.jsonl", "--config", tmp_path / "none.yaml")
    assert (result.exit_code, "[SF-REWARD]" in result.stderr) == (2, True)


COVERED = 0.935  # of 95 %: 3,000 repetitions have a standard error of 0.004, and the interval is approximate


@pytest.mark.parametrize(("prompts", "draws"), [(40, 8), (100, 4), (200, 1)])
def test_intervals_cover_the_mean_of_prompts_of_which_some_are_hard(prompts, draws):
    """The truth is the mean over all prompts there could be. Twin: answers taken for independent, they do not."""
    random, covered, naive = np.random.default_rng(0), 0, 0
    for _ in range(3000):
        own = random.beta(0.4, 0.6, prompts)
        chances = random.binomial(draws, own) / draws
        low, high = mean_interval(chances.tolist(), draws)
        covered += low <= 0.4 <= high
        low, high = wilson(float(chances.mean()), prompts * draws)
        naive += low <= 0.4 <= high
    assert covered / 3000 >= COVERED
    assert (naive / 3000 < COVERED) == (draws > 1)


def test_intervals_at_the_ends_are_those_of_the_prompts():
    assert mean_interval([1.0] * 20, 8) == wilson(1.0, 20)
    assert mean_interval([0.0] * 20, 8) == wilson(0.0, 20)
    assert mean_interval([1.0, 0.0, 0.0, 0.0], 1) == pytest.approx(wilson(0.25, 4))
    assert mean_interval([0.5, 0.5, 0.5 + 1e-9], 8) == pytest.approx(wilson(0.5, 24))
