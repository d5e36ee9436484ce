"""Result files: names as elsewhere, figures from the state."""

import json
import math

from surefoot.report.results import eval_results, train_results, write_results
from surefoot.training.report import EvalReport

BESIDE = {"set-up": 24.0, "compile": 6.0, "batches": 0.5, "evaluation": 5.0, "saving": 2.0, "other": 0.5}
COUNTS = {
    "loss": 1.75,
    "steps": 3,
    "epoch": 0.5,
    "examples": 12,
    "tokens": 600,
    "supervised": 50,
    "skipped": 1,
    "scaler_skips": 0,
}


def test_the_training_time_has_evaluation_and_saving_and_the_whole_what_comes_before():
    results = train_results(**COUNTS, seconds=2.0, beside=BESIDE)
    assert (results["steps_runtime"], results["train_runtime"], results["whole_runtime"]) == (2.0, 10.0, 40.0)
    parts = ("setup", "compile", "batches", "evaluation", "saving", "other")
    assert results["steps_runtime"] + sum(results[f"{part}_runtime"] for part in parts) == results["whole_runtime"]
    assert (results["train_samples_per_second"], results["train_tokens_per_second"]) == (1.2, 60.0)
    assert results["steps_tokens_per_second"] == 300.0
    assert {"epoch", "train_loss", "train_steps_per_second", "skipped_steps"} <= results.keys()


def test_twin_without_what_lay_between_the_training_time_is_that_of_the_steps():
    results = train_results(**COUNTS, seconds=2.0, beside={})
    assert results["train_runtime"] == results["whole_runtime"] == results["steps_runtime"] == 2.0


def test_a_session_that_took_no_step_has_no_rates():
    assert train_results(**COUNTS, seconds=0.0, beside={})["train_steps_per_second"] is None


def test_a_non_finite_evaluation_is_null():
    results = eval_results(EvalReport(3, math.inf, math.inf, 0.25, 40, 1.0), 0.5)
    assert (results["eval_loss"], results["perplexity"], results["eval_accuracy"]) == (None, None, 0.25)


def test_the_files(tmp_path):
    train = train_results(**COUNTS, seconds=2.0, beside=BESIDE)
    evaluation = eval_results(EvalReport(3, 1.5, math.exp(1.5), 0.25, 40, 1.0), 0.5)
    together = write_results(tmp_path, train, evaluation, {"accuracy_after": 0.9})
    read = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert read == {
        "train_results.json": train,
        "eval_results.json": evaluation,
        "all_results.json": {**evaluation, **train, "accuracy_after": 0.9},
    }
    assert together == read["all_results.json"]


def test_no_evaluation_no_file(tmp_path):
    write_results(tmp_path, train_results(**COUNTS, seconds=2.0, beside=BESIDE), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all_results.json", "train_results.json"]
