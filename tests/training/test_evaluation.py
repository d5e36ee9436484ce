"""Answers to tokenized examples: the right prompt, the right expectation, and a metric that counts what it says."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import Example
from surefoot.training import evaluation as answers_module
from surefoot.training.evaluation import Answered, answer_examples, exact_match, last_answer

POSITIONS = 512


def example(learned, ids=None):
    mask = np.array([character == "x" for character in learned])
    return Example(np.arange(len(mask)) if ids is None else np.array(ids), mask, 1)


@pytest.mark.parametrize(
    ("learned", "prompt", "answer"),
    [
        ("..xx", [0, 1], [2, 3]),
        ("..xx.", [0, 1], [2, 3]),
        (".xx..xxx", [0, 1, 2, 3, 4], [5, 6, 7]),  # a dialogue is asked for its last answer, with its real history
        (".x", [0], [1]),
    ],
)
def test_the_last_answer_and_what_stands_before_it(learned, prompt, answer):
    assert last_answer(example(learned)) == (prompt, answer)


def test_exact_match_by_hand():
    rows = [
        Answered("p", "heron", " heron\n", True),
        Answered("p", "heron", "heron", False),  # it never stopped: the text only begins rightly
        Answered("p", "heron", "Heron", True),
        Answered("p", "", "", True),
    ]
    assert exact_match(rows) == 0.5


class Rows:
    """As much of a TokenizedDataset as is asked for."""

    processor = None

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    def with_facts(self, index, text):
        return text


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("model"))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def greedy(model, prompt, count, stops):
    """One token after the other, without cache or batch."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token in stops:
            return ids[len(prompt) :], True
        ids.append(token)
    return ids[len(prompt) :], False


def ask(opened, rows, **changes):
    model, tokenizer = opened
    arguments = {
        "count": None,
        "stop_ids": (tokenizer.eos_token_id,),
        "pad_id": 0,
        "max_new_tokens": 6,
        "positions": POSITIONS,
        "rows": 2,
    }
    return answer_examples(model, tokenizer, Rows(rows), **(arguments | changes))


def prompts(count=5):
    draw = np.random.default_rng(0)
    return [
        Example(draw.integers(5, 300, length + 2), np.array([False] * length + [True] * 2), 1)
        for length in draw.integers(3, 20, count)
    ]


def alone(opened, rows):
    """What each prompt is answered when it is asked by itself."""
    model, tokenizer = opened
    for one in rows:
        prompt, expected = last_answer(one)
        ids, stopped = greedy(model, prompt, 6, (tokenizer.eos_token_id,))
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in (expected, ids)]
        yield Answered(tokenizer.decode(prompt), *texts, stopped)


def test_answers_in_batches_are_those_of_one_prompt_alone_and_in_order(opened):
    rows = prompts()
    assert ask(opened, rows) == list(alone(opened, rows))


def test_twin_answers_that_go_to_the_wrong_prompts_are_seen(opened, monkeypatch):
    real = answers_module.generate_answers
    monkeypatch.setattr(answers_module, "generate_answers", lambda *args, **kwargs: real(*args, **kwargs)[::-1])
    rows = prompts()
    assert ask(opened, rows) != list(alone(opened, rows))


def test_only_the_first_so_many_are_asked(opened):
    assert len(ask(opened, prompts(), count=3)) == 3
    assert len(ask(opened, prompts(), count=99)) == 5


def test_a_prompt_that_fills_all_positions_is_not_answered(opened):
    (found,) = ask(opened, prompts(1), positions=3)
    assert (found.answer, found.stopped) == ("", False)


def test_it_gives_up_between_batches(opened):
    asked = iter([False, True])
    assert ask(opened, prompts(), give_up=lambda: next(asked)) is None


def sized(length):
    """A prompt of that many tokens, and two more to be expected."""
    draw = np.random.default_rng(length)
    return Example(draw.integers(5, 300, length + 2), np.array([False] * length + [True] * 2), 1)


NEAR, FAR = sized(POSITIONS - 2), sized(9)  # the first leaves room for two tokens, the second for all six


def test_a_prompt_near_the_limit_shortens_nobody_elses_answer(opened):
    assert ask(opened, [NEAR, FAR]) == [*ask(opened, [NEAR]), *ask(opened, [FAR])]


def test_twin_in_one_batch_it_would(opened, monkeypatch):
    (alone,) = ask(opened, [FAR])
    monkeypatch.setattr(answers_module, "_batches", lambda lengths, rows, roomy: iter([[0, 1]]))
    assert ask(opened, [NEAR, FAR])[1] != alone
