"""The two ways of counting: the likeliest of eight answers, and what the model writes by itself."""

import pytest
import torch
from torch.nn import functional as F

from surefoot.commands.quickstart import score as scoring
from surefoot.commands.quickstart import world
from surefoot.commands.quickstart.score import score
from surefoot.methods.open_model import open_for_use
from surefoot.models.generate import Generated

SEED = 1
# Chance is 12.5 %. The base answers with one or two favourite rooms, and each room is right equally often, so it stays
# near that; 128 independent guesses would spread by 2.9 points (one standard deviation).
NEAR_CHANCE = (0.05, 0.20)


@pytest.fixture(scope="module")
def asked():
    return open_for_use(str(world.base_folder()))


@pytest.fixture(scope="module")
def held_out():
    return world.instructions(SEED)[1]


def test_the_base_is_at_chance(asked, held_out):
    before = score(asked.model, asked, held_out)
    low, high = NEAR_CHANCE
    assert low <= before.accuracy <= high
    assert before.exact == 0.0
    assert len(before.written) == len(held_out)


def test_the_likeliest_answer_is_the_one_of_a_plain_computation(asked, held_out):
    tokenizer, model = asked.tokenizer, asked.model

    def log_probability(record: world.Record, answer: str) -> float:
        question = "\n".join(part for part in (record["instruction"], record["input"]) if part)
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        ids = torch.tensor([*prompt, *tokenizer.encode(answer + "<|end|>", add_special_tokens=False)])
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].double()
        return -float(F.cross_entropy(logits, ids[len(prompt) :], reduction="sum"))

    few = held_out[:5]
    with torch.no_grad():
        expected = [max(world.answers(), key=lambda answer: log_probability(record, answer)) for record in few]
        assert list(scoring._likeliest(model, asked, few)) == expected


def test_scoring_leaves_the_mode_of_the_model(asked, held_out):
    asked.model.train()
    score(asked.model, asked, held_out[:2])
    assert asked.model.training
    asked.model.eval()


@pytest.mark.parametrize(
    ("written", "stopped", "exact"), [("right", True, 1.0), ("right", False, 0.0), ("no", True, 0.0)]
)
def test_a_written_answer_counts_when_it_is_complete_and_ends(asked, held_out, monkeypatch, written, stopped, exact):
    def answer(model, tokenizer, prompts, **settings):
        texts = [record["output"] if written == "right" else "In a room." for record in held_out[:3]]
        return [Generated((), text, stopped) for text in texts]

    monkeypatch.setattr(scoring, "generate_answers", answer)
    assert score(asked.model, asked, held_out[:3]).exact == exact
