"""lm-evaluation-harness on an opened model: against its own model class, and what goes wrong.

lm-eval brings some 400 MB (scipy, scikit-learn, pandas …), so it is no part of the development set-up: `make harness`
installs it and runs all of these.
"""

import json
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from helpers.adapter_runs import a_run
from helpers.faults import prints_fault, raises_fault
from helpers.zoo import ZOO
from surefoot.commands.main import main
from surefoot.evaluate.harness import needs as harness_needs
from surefoot.evaluate.harness import tasks as harness
from surefoot.evaluate.harness.needs import task_names
from surefoot.evaluate.harness.tasks import HarnessRequest, check_tasks, measured, metrics_of, run_harness, share_rows
from surefoot.evaluate.side_by_side import Side
from surefoot.methods import open_model
from surefoot.methods.open_model import open_for_use
from surefoot.models.forward import causal_model
from surefoot.report.tables.evaluation import Cell
from surefoot.system.libraries import is_installed

needs_harness = pytest.mark.skipif(not is_installed("lm_eval"), reason="the extra `eval` (lm-eval) is not installed")
ROUNDING = 1e-4  # nats and ratios; fp32 sums in batches of other shapes

CHOICE = """task: sums_choice
output_type: multiple_choice
doc_to_text: "Question: {{q}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITTEN = """task: sums_written
output_type: generate_until
doc_to_text: "Question: {{q}}\\nAnswer:"
doc_to_target: a
generation_kwargs: {until: ["t"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
TEXT = """task: sums_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}} {{a}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder of tasks with their data beside them: no network."""
    folder = tmp_path_factory.mktemp("tasks")
    sums = [(a, b) for a in range(4) for b in range(2)]
    rows = [
        {"q": f"What is {a} plus {b}?", "choices": [str(a + b), str(a + b + 1)], "gold": 0, "a": str(a + b)}
        for a, b in sums
    ]
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}}}\ntest_split: test\n"
    for name, text in (("choice", CHOICE), ("written", WRITTEN), ("text", TEXT)):
        (folder / f"{name}.yaml").write_text(text + source)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return ZOO["llama3"](tmp_path_factory.mktemp("zoo") / "llama3")


REQUESTS = [("What is 1 plus 2? Answer:", " 3"), ("A heron is", " a bird of some size"), ("", "a fish"), ("One", " 4")]


def asked(*arguments) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=one) for one in arguments]


@needs_harness
def test_answers_are_those_of_the_harness_own_model(model):
    from lm_eval.models.huggingface import HFLM

    from surefoot.evaluate.harness.model import SurefootLM

    opened = open_for_use(str(model))
    ours = SurefootLM(opened, rows=3)
    theirs = HFLM(pretrained=causal_model(opened.model), tokenizer=opened.tokenizer, batch_size=1)
    for (mine, my_greedy), (other, greedy) in zip(
        ours.loglikelihood(asked(*REQUESTS)), theirs.loglikelihood(asked(*REQUESTS)), strict=True
    ):
        assert abs(mine - other) < ROUNDING
        assert my_greedy == greedy
    settings = {"until": ["e", "\n\n"], "max_gen_toks": 8, "do_sample": False}
    prompts = asked(*((context, dict(settings)) for context, _ in REQUESTS if context))
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


LONG = "What is a heron? " * 80  # longer than the model's positions


@needs_harness
def test_a_rolling_text_is_scored_without_its_bos(model):
    """Against the harness' own class where it puts no BOS into the text, as far as one window goes."""
    from lm_eval.models.huggingface import HFLM

    from surefoot.evaluate.harness.model import SurefootLM

    opened = open_for_use(str(model))
    ours = SurefootLM(opened, rows=3)
    plain, doubled = (
        HFLM(causal_model(opened.model), tokenizer=opened.tokenizer, batch_size=1, add_bos_token=bos)
        for bos in (False, True)
    )
    short = asked(("A trout.",), ("What is a heron?",))
    mine = ours.loglikelihood_rolling(short)
    assert mine == pytest.approx(plain.loglikelihood_rolling(short), abs=ROUNDING)
    twin = doubled.loglikelihood_rolling(short)  # BOS in front of BOS, and its likelihood in the sum
    assert all(abs(one - other) > ROUNDING for one, other in zip(mine, twin, strict=True))

    ids, count = ours.tok_encode(LONG)[1:], opened.positions
    windows = [(ids[:count], count), (ids[-(count - 1) - 1 :], len(ids) - count)]
    assert count < len(ids) < 2 * count
    by_hand = 0.0
    for text, scored in windows:
        with torch.no_grad():
            logits = causal_model(opened.model)(torch.tensor([[opened.bos_id, *text[:-1]]])).logits[0]
        assert len(logits) <= count
        likely = logits.double().log_softmax(-1).gather(1, torch.tensor(text)[:, None])
        by_hand += float(likely[-scored:].sum())
    assert ours.loglikelihood_rolling(asked((LONG,))) == pytest.approx([by_hand], abs=ROUNDING * 10)


@needs_harness
def test_what_is_cut_keeps_its_bos(model, monkeypatch):
    """Each sequence that reaches the model begins with BOS, and has it nowhere else."""
    from surefoot.evaluate.harness import model as harness_model

    opened = open_for_use(str(model))
    ours, seen = harness_model.SurefootLM(opened, rows=2), []

    def look(module, args, kwargs):
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
        seen.extend(row[real.bool()].tolist() for row, real in zip(ids, mask[:, -ids.shape[1] :], strict=True))

    handle = causal_model(opened.model).get_decoder().register_forward_pre_hook(look, with_kwargs=True)

    def ask():
        seen.clear()
        ours.loglikelihood(asked((LONG, " bird"), ("A heron", " fish")))
        ours.loglikelihood_rolling(asked((LONG,)))
        ours.generate_until(asked((LONG, {"until": [], "max_gen_toks": 1})))
        return [(row[0] == opened.bos_id, row.count(opened.bos_id), len(row)) for row in seen]

    found = ask()
    assert [one[:2] for one in found] == [(True, 1)] * 5
    assert sorted(length for *_, length in found)[-4:] == [opened.positions - 1, *[opened.positions] * 3]
    monkeypatch.setattr(harness_model, "last_tokens", lambda ids, room, bos_id: ids[-room:])  # twin
    assert not all(first for first, *_ in ask())
    handle.remove()


@needs_harness
def test_twin_another_model_scores_otherwise(model, tmp_path):
    from surefoot.evaluate.harness.model import SurefootLM

    first = SurefootLM(open_for_use(str(model)), rows=2).loglikelihood(asked(*REQUESTS))
    other = SurefootLM(open_for_use(str(ZOO["llama3"](tmp_path / "other", seed=1))), rows=2)
    assert all(abs(a[0] - b[0]) > ROUNDING for a, b in zip(first, other.loglikelihood(asked(*REQUESTS)), strict=True))


@needs_harness
def test_tasks_of_a_folder_run_offline(model, tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = "sums_choice,sums_written,sums_text"
    result = CliRunner().invoke(
        main,
        ["evaluate", "harness", str(model), "--tasks", names, "--include-path", str(tasks), "--out", str(tmp_path)],
    )
    assert result.exit_code == 0, result.stderr
    assert "sums_choice acc" in result.stdout
    found = json.loads((tmp_path / "harness.json").read_text())["sides"]["model"]
    assert set(found["results"]) == set(names.split(","))
    assert (tmp_path / "harness.png").read_bytes().startswith(b"\x89PNG")


@needs_harness
def test_a_task_without_its_data_is_one_line(model, tasks, tmp_path):
    (tmp_path / "lost.yaml").write_text(
        CHOICE.replace("sums_choice", "lost")
        + "dataset_path: json\ndataset_kwargs: {data_files: {test: nowhere.jsonl}}\ntest_split: test\n"
    )
    result = CliRunner().invoke(
        main, ["evaluate", "harness", str(model), "--tasks", "lost", "--include-path", str(tmp_path)]
    )
    assert result.exit_code == 3
    assert prints_fault(result.stderr.splitlines()[-1], "SF-EVALUATE", "task lost")


@needs_harness
def test_what_decoding_does_not_have_is_refused():
    from surefoot.evaluate.harness.model import _settings

    with raises_fault("SF-EVALUATE", "--tasks"):
        _settings({"until": ["\n"], "top_k": 5})
    assert _settings({"until": "x", "max_new_tokens": 3, "temperature": 0.7})["temperature"] == 0  # not sampled
    assert _settings({"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.0})["temperature"] == 0.7


@pytest.mark.skipif(is_installed("lm_eval"), reason="lm-eval is installed here")
def test_a_missing_package_is_one_line(model):
    result = CliRunner().invoke(main, ["evaluate", "harness", str(model), "--tasks", "arc_easy"])
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert "pip install 'surefoot[eval]'" in result.stderr
    assert result.stderr.endswith("[SF-PACKAGE]\n")


def test_an_unknown_task_is_one_line():
    with raises_fault("SF-EVALUATE", "--tasks", remedy=["arc_easy"]):
        check_tasks(["arc-eazy"], ["arc_easy", "piqa"])
    with raises_fault("SF-EVALUATE", "--tasks"):
        task_names(" , ")
    assert task_names("arc_easy, piqa") == ("arc_easy", "piqa")


def test_metrics_and_their_errors():
    found = {
        "results": {
            "one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 3},
            "two": {"exact_match,strict": 0.25, "exact_match_stderr,strict": "N/A", "ppl,none": 9.0},
        }
    }
    assert metrics_of(found) == {
        "one acc": Cell(0.5, 0.1),
        "two exact_match (strict)": Cell(0.25),
        "two ppl": Cell(9.0),
    }
    rows, names = share_rows({"model": found})
    assert names == ["one acc", "two exact_match (strict)"]
    assert [row.name for row in rows] == ["model"]


@needs_harness
def test_limit_and_sides(model, tasks):
    opened = open_for_use(str(model))
    found = run_harness(opened, HarnessRequest(("sums_choice",), tasks, limit=3))
    assert found["model"]["n-samples"]["sums_choice"]["effective"] == 3
    with raises_fault("SF-USE-FLAG", "--only"):
        run_harness(opened, HarnessRequest(("sums_choice",), tasks, only="adapter"))


class Drawing:
    """Of a task what is asked of it here: examples before its question, out of a stream of random numbers."""

    def set_fewshot_seed(self, seed):
        self.stream = random.Random(seed)

    def shots(self):
        return self.stream.sample(range(100), 5)


def test_both_sides_are_asked_after_the_same_examples(monkeypatch):
    task = Drawing()
    compared = tuple(Side(name, nullcontext) for name in ("base", "adapter"))
    found = measured(compared, [task], lambda: {"shots": [task.shots(), task.shots()]})
    assert list(found) == ["base", "adapter"]
    assert found["base"] == found["adapter"]
    assert found["base"]["shots"][0] != found["base"]["shots"][1]
    task.set_fewshot_seed(harness._SHOTS_SEED)
    assert found["base"]["shots"][0] == task.shots()
    monkeypatch.setattr(task, "set_fewshot_seed", lambda seed: None)  # twin: one stream for both
    found = measured(compared, [task], lambda: {"shots": task.shots()})
    assert found["base"] != found["adapter"]


@needs_harness
def test_both_sides_get_the_same_requests(model, tasks, tmp_path, monkeypatch):
    from lm_eval.api.task import Task

    from surefoot.evaluate.harness.model import SurefootLM

    run, requests = a_run(tmp_path / "run", model), []
    own = SurefootLM.loglikelihood

    def look(self, asked, disable_tqdm=True):
        requests.append([one.args for one in asked])
        return own(self, asked, disable_tqdm)

    monkeypatch.setattr(SurefootLM, "loglikelihood", look)
    wanted = HarnessRequest(("sums_choice",), tasks, shots=2)
    run_harness(open_for_use(str(run)), wanted)
    first, second = requests
    assert first == second
    assert first[0][0].count("Question:") == 3
    draw = Task.set_fewshot_seed
    monkeypatch.setattr(Task, "set_fewshot_seed", lambda task, seed: None if hasattr(task, "begun") else start(task))

    def start(task):
        task.begun = True
        draw(task, seed=1234)

    requests.clear()
    run_harness(open_for_use(str(run)), wanted)  # twin: seeded once, as the harness does
    first, second = requests
    assert first != second


@pytest.fixture
def a_harness_of_two_tasks(monkeypatch):
    """As far as its list of tasks goes."""
    manager = SimpleNamespace(all_tasks=["arc_easy", "piqa"])
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=lambda include_path: manager))
    for module in (harness, harness_needs):
        monkeypatch.setattr(module, "require_harness", lambda: None)


def test_an_unknown_task_is_told_before_a_model_is_opened(a_harness_of_two_tasks, model, monkeypatch):
    def opened(*given):
        raise AssertionError("a model was opened")

    monkeypatch.setattr(open_model, "open_for_use", opened)
    arguments = ["evaluate", "harness", str(model), "--tasks", "arc_esay"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert prints_fault(result.stderr, "SF-EVALUATE", "--tasks", "arc_esay", "arc_easy")
    monkeypatch.setattr(harness, "check_tasks", lambda asked, known: None)  # twin: unchecked, the model comes first
    result = CliRunner().invoke(main, arguments)
    assert "a model was opened" in result.output + str(result.exception)
