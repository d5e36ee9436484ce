"""`surefoot evaluate commonsense`: asked as published, interrupted and continued, by likelihood; what goes wrong."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from helpers.adapter_runs import a_plan, a_run
from helpers.faults import gives
from helpers.plans import choice
from helpers.tiers import diagonal
from helpers.zoo import ZOO
from surefoot.commands.main import main
from surefoot.evaluate.commonsense import evaluation as stage
from surefoot.models import generate
from surefoot.planning.plan import plan_to_json

ROUNDING = 2e-4  # nats; sums of a dozen fp32 log probabilities
GOLD = ("true", "false", "true", "true", "false")
BOOLQ = [
    {
        "instruction": "Please answer the following question with true or false, question: is it "
        + "very " * n
        + "so?\n\nAnswer format: true/false",
        "input": "",
        "output": f"the correct answer is {gold}",
        "answer": gold,
    }
    for n, gold in enumerate(GOLD)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("commonsense")
    ZOO["llama3"](root / "tiny")
    folder = root / "data" / "dataset" / "boolq"
    folder.mkdir(parents=True)
    (folder / "test.json").write_text(json.dumps(BOOLQ))
    return root


def call(place: Path, out: Path, *more: object) -> Result:
    words = [place / "tiny", "--data", place / "data", "--sets", "boolq", "--out", out, *more]
    return CliRunner().invoke(main, ["evaluate", "commonsense", *map(str, words)])


def answers(out: Path, label: str = "tiny-base") -> list[dict]:
    return json.loads((out / f"{label}-boolq.json").read_text())


def legacy_prompt(record: dict) -> str:
    """The published evaluation prompt, written out by hand."""
    indent = " " * 16
    head = "Below is an instruction that describes a task. Write a response that appropriately completes the request. "
    return f"{head}\n\n{indent}### Instruction:\n{indent}{record['instruction']}\n\n{indent}### Response:\n{indent}"


@pytest.fixture(scope="module")
def reference(place) -> list[str]:
    """transformers' own beam search on prompts of our own rendering, one by one."""
    model, tokenizer = (kind.from_pretrained(place / "tiny") for kind in (AutoModelForCausalLM, AutoTokenizer))
    stop = tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"])
    config = GenerationConfig(num_beams=4, do_sample=False, max_new_tokens=32, eos_token_id=stop, pad_token_id=stop[0])
    model.generation_config = config
    texts = []
    for record in BOOLQ:
        ids = tokenizer(legacy_prompt(record), return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


def test_answers_are_the_published_way_of_asking(place, reference, tmp_path):
    result = call(place, tmp_path, "--batch-size", 2)
    assert result.exit_code == 0, result.stderr
    found = answers(tmp_path)
    assert [one["output_pred"] for one in found] == [stage.response_of(text) for text in reference]
    assert [{key: one[key] for key in BOOLQ[0]} for one in found] == BOOLQ
    assert all(one["flag"] == (one["pred"] == one["answer"]) for one in found)
    correct = sum(one["flag"] for one in found)
    assert f"test:5/5 | accuracy {correct}  {correct / 5}\ntest finished\n" in result.stdout
    report = json.loads((tmp_path / "tiny-base-commonsense.json").read_text())
    assert any(all(gives(caution, one) for one in ("boolq", 5, "3,270")) for caution in report["cautions"])
    assert report["sides"]["model"]["sets"]["boolq"]["correct"] == correct
    assert len(report["published"]) == 9
    assert (tmp_path / "tiny-base-commonsense.png").read_bytes().startswith(b"\x89PNG")


def test_twin_another_prompt_is_noticed(place, reference, tmp_path):
    assert call(place, tmp_path, "--template", "commonsense").exit_code == 0
    assert [one["output_pred"] for one in answers(tmp_path)] != [stage.response_of(text) for text in reference]


def test_twin_pads_that_are_attended_are_noticed(place, reference, tmp_path, monkeypatch):
    def unmasked(prompts, pad_id, device):
        ids, mask = left_padded(prompts, pad_id, device)
        return ids, torch.ones_like(mask)

    left_padded = generate.left_padded
    monkeypatch.setattr("surefoot.models.beams.left_padded", unmasked)
    assert call(place, tmp_path, "--batch-size", 5).exit_code == 0
    assert [one["output_pred"] for one in answers(tmp_path)] != [stage.response_of(text) for text in reference]


def interrupted(monkeypatch, after: int) -> None:
    """Ctrl-C in the batch behind the first `after`."""
    asked = []
    whole = stage.beam_answers

    def answer(*arguments, **settings):
        asked.append(1)
        if len(asked) > after:
            raise KeyboardInterrupt
        return whole(*arguments, **settings)

    monkeypatch.setattr(stage, "beam_answers", answer)


def test_an_interrupted_evaluation_goes_on_where_it_stopped(place, reference, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupted(patch, after=2)
        assert call(place, tmp_path, "--batch-size", 1).exit_code == 130
    assert len(answers(tmp_path)) == 2
    with monkeypatch.context() as patch:
        interrupted(patch, after=3)  # three more and no fourth
        result = call(place, tmp_path, "--batch-size", 1)
    assert result.exit_code == 0
    assert "\n2 of 5 " in result.stdout
    assert [one["output_pred"] for one in answers(tmp_path)] == [stage.response_of(text) for text in reference]
    monkeypatch.setattr(stage, "beam_answers", lambda *_, **__: pytest.fail("asked again"))
    assert call(place, tmp_path).exit_code == 0


def test_answers_of_another_evaluation_are_in_the_way(place, tmp_path):
    assert call(place, tmp_path, "--mode", "fast").exit_code == 0
    before = answers(tmp_path)
    assert call(place, tmp_path).exit_code == 2
    assert call(place, tmp_path, "--mode", "fast", "--max-samples", 3).exit_code == 2
    assert answers(tmp_path) == before
    assert call(place, tmp_path, "--mode", "fast", "--max-samples", 3, "--overwrite").exit_code == 0
    assert len(answers(tmp_path)) == 3
    changed = [{**one, "answer": "false"} for one in answers(tmp_path)]
    (tmp_path / "tiny-base-boolq.json").write_text(json.dumps(changed))
    assert call(place, tmp_path, "--mode", "fast", "--max-samples", 3).exit_code == 2
    assert answers(tmp_path) == changed


def test_answers_that_ended_elsewhere_are_another_evaluations(place, tmp_path):
    """The same prompts and weights; the runs differ in what ends an answer."""
    plan = a_plan("tokenizer", stop=(321,))
    run = a_run(tmp_path / "run", place / "tiny", plan)
    wanted = ("--adapter", run, "--template", "trained", "--max-samples", 1)
    assert call(place, tmp_path / "out", *wanted).exit_code == 0
    again = call(place, tmp_path / "out", *wanted)
    assert [line.split()[:3] for line in again.stdout.splitlines()].count(["1", "of", "1"]) == 2
    longer = replace(plan, tokenizer=replace(plan.tokenizer, stop=choice((321, 65))))
    (run / "plan.json").write_text(json.dumps({"plan": plan_to_json(longer)}))
    result = call(place, tmp_path / "out", *wanted)
    assert (result.exit_code, "stop tokens" in result.stderr) == (2, True)


def test_options_of_other_tokens_are_another_evaluations(place, tmp_path, monkeypatch):
    wanted = ("--mode", "fast", "--max-samples", 1)
    assert call(place, tmp_path, *wanted).exit_code == 0
    known = json.loads((tmp_path / "identity" / "tiny-base-boolq.json").read_text())["option tokens"]
    ids = AutoTokenizer.from_pretrained(place / "tiny")("the correct answer is false", add_special_tokens=False)
    assert known["false"] == ids["input_ids"]
    assert known.keys() == {"true", "false"}
    monkeypatch.setattr(stage, "SENTENCE", "my answer is {}")
    result = call(place, tmp_path, *wanted)
    assert (result.exit_code, "option tokens" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("trained", "asked", "said"),
    [
        ("alpaca", "commonsense-eval", True),
        ("alpaca", "trained", False),
        ("alpaca", "alpaca", False),
        (None, "commonsense-eval", False),  # the twin: nobody knows what it was trained with
    ],
)
def test_another_prompt_than_training_s_is_a_caution_with_the_way_out(place, tmp_path, trained, asked, said):
    ends = (AutoTokenizer.from_pretrained(place / "tiny").eos_token_id,)
    run = a_run(tmp_path / "run", place / "tiny", a_plan(trained, ends) if trained else None)
    words = ("--adapter", run, "--mode", "fast", "--max-samples", 1, "--template", asked, "--only", "adapter", "--json")
    result = call(place, tmp_path / "out", *words)
    assert result.exit_code == 0, result.stderr
    told = [one for one in json.loads(result.stdout)["cautions"] if "--template trained" in one]
    assert len(told) == said
    first_question = result.stderr.index("test:")
    assert ("--template trained" in result.stderr[:first_question]) == said  # before hours of asking


def test_an_adapter_called_base_needs_another_name(place, tmp_path):
    """Else the second side would delete the answers of the first."""
    run = a_run(tmp_path / "base", place / "tiny")
    wanted = ("--adapter", run, "--mode", "fast", "--max-samples", 2)
    for more in ((), ("--only", "adapter")):
        result = call(place, tmp_path / "out", *wanted, *more)
        assert (result.exit_code, "--label: " in result.stderr) == (2, True)
        assert not (tmp_path / "out").exists()
    result = call(place, tmp_path / "out", *wanted, "--label", "mine")
    assert result.exit_code == 0, result.stderr
    one, other = (answers(tmp_path / "out", label) for label in ("tiny-base", "tiny-mine"))
    assert one[0]["log_likelihoods"] != other[0]["log_likelihoods"]


def test_old_answers_never_stand_under_a_new_identity(place, tmp_path, monkeypatch):
    """A kill right after --overwrite began, before the first batch."""
    assert call(place, tmp_path, "--mode", "fast").exit_code == 0
    with monkeypatch.context() as patch:
        interrupted(patch, after=0)
        assert call(place, tmp_path, "--overwrite").exit_code == 130
    result = call(place, tmp_path)
    assert result.exit_code == 0
    assert " of 5 " not in result.stdout
    assert not any("log_likelihoods" in one for one in answers(tmp_path))


def test_a_strangers_file_is_left_alone(place, tmp_path):
    (tmp_path / "tiny-base-boolq.json").write_text("[]")
    assert call(place, tmp_path).exit_code == 2
    assert (tmp_path / "tiny-base-boolq.json").read_text() == "[]"


def test_fast_takes_the_likeliest_option(place, tmp_path):
    assert call(place, tmp_path, "--mode", "fast").exit_code == 0
    model, tokenizer = (kind.from_pretrained(place / "tiny") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for one in answers(tmp_path):
        expected = {}
        for option in ("true", "false"):
            prompt = tokenizer(legacy_prompt(one))["input_ids"]
            tail = tokenizer(f"the correct answer is {option}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tail])).logits[0, len(prompt) - 1 : -1].double()
            expected[option] = float(logits.log_softmax(-1).gather(1, torch.tensor(tail)[:, None]).sum())
        assert one["log_likelihoods"] == pytest.approx(expected, abs=ROUNDING)
        assert one["pred"] == max(expected, key=lambda option: expected[option])


def test_a_model_that_knows_the_answers_scores_all(place, tmp_path, monkeypatch):
    """Gold texts through everything but the model."""
    gold = iter(record["output"] for record in BOOLQ)

    def know(*arguments, **_):
        return [generate.Generated((), next(gold), True) for _ in arguments[2]]

    monkeypatch.setattr(stage, "beam_answers", know)
    result = call(place, tmp_path, "--json")
    average = json.loads(result.stdout)["sides"]["model"]["average"]
    assert (average["accuracy"], average["standard_error"]) == (1.0, 0.0)
    assert average["interval_95"] == pytest.approx([0.5655, 1.0], abs=1e-4)  # Wilson's, of 5 in 5


@pytest.fixture
def with_long_rows(place, tmp_path) -> Path:
    """A place whose boolq has two more records, in front and among the others, that no model of 512 positions can be
    asked."""
    long = {**BOOLQ[0], "instruction": "so " * 600 + BOOLQ[0]["instruction"]}
    (tmp_path / "tiny").symlink_to(place / "tiny")
    folder = tmp_path / "data" / "boolq"
    folder.mkdir(parents=True)
    (folder / "test.json").write_text(json.dumps([long, *BOOLQ[:2], long, *BOOLQ[2:]]))
    return tmp_path


@pytest.mark.parametrize(("mode", "size"), diagonal(["published", "fast"], [3, 1]))
def test_a_row_without_room_is_wrong_and_the_others_are_answered(place, with_long_rows, mode, size):
    out = with_long_rows / "out"
    result = call(with_long_rows, out, "--mode", mode, "--batch-size", size)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"boolq\s+2\s+of\s+7\b", result.stdout)
    found = answers(out)
    assert ["too_long" in one for one in found] == [True, False, False, True, False, False, False]
    assert [one["flag"] for one in found if "too_long" in one] == [False, False]
    assert call(place, with_long_rows / "without", "--mode", mode, "--batch-size", size).exit_code == 0
    alone = answers(with_long_rows / "without")
    assert [one["pred"] for one in found if "too_long" not in one] == [one["pred"] for one in alone]
    scored = json.loads((out / "tiny-base-commonsense.json").read_text())["sides"]["model"]["sets"]["boolq"]
    assert (scored["correct"], scored["total"]) == (sum(one["flag"] for one in alone), 7)


def test_twin_without_a_long_row_nothing_is_said_of_it(place, tmp_path):
    assert " of 5)" not in call(place, tmp_path, "--mode", "fast").stdout


def test_a_set_of_which_no_prompt_fits_is_refused_before_the_first_question(with_long_rows):
    result = call(with_long_rows, with_long_rows / "out", "--max-samples", 1)
    assert (result.exit_code, "boolq/test.json: " in result.stderr) == (2, True)


def test_a_wrong_input_is_one_line(place, tmp_path):
    """Others: tests/commands/test_refused_before_torch.py."""
    for flag, value in (
        ("--sets", "boolk"),
        ("--sets", "piqa"),
        ("--label", "../../evil"),
        ("--label", ".."),
        ("--model-label", "x/y"),
        ("--template", "llama4"),
    ):
        result = call(place, tmp_path / "out", flag, value)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), (flag, value)
        assert f"{flag}: " in result.stderr or value == "piqa", result.stderr
        assert not list(tmp_path.iterdir())
