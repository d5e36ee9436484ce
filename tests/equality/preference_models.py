"""The two models and the batches of which TRL's numbers are recorded. `python -m equality.preference_models FOLDER`
writes the models."""

import random
import sys
from pathlib import Path

Answer = tuple[list[int], list[int]]  # ids of prompt and answer
_draw = random.Random(5)


def _ids(count: int) -> list[int]:
    return [_draw.randrange(1, 300) for _ in range(count)]


def _pair(prompt: int, chosen: int, rejected: int) -> tuple[Answer, Answer]:
    asked = _ids(prompt)
    return (asked, _ids(chosen)), (asked, _ids(rejected))


PAIRS = [_pair(4, 3, 9), _pair(11, 7, 2), _pair(2, 5, 5), _pair(6, 1, 12)]
_PROMPTS = [_ids(4), _ids(9), _ids(2), _ids(6), _ids(5)]
_ANSWERS = [_ids(3), _ids(8), _ids(5), _ids(2), _ids(11)]
_GOOD = [True, False, True, True, False]
# Prompt and own answer, the same prompt with the answer before it, whether the own one is good.
JUDGED = [((p, _ANSWERS[at]), (p, _ANSWERS[at - 1]), _GOOD[at]) for at, p in enumerate(_PROMPTS)]


def write_models(folder: Path) -> None:
    """`policy`, and `reference`: the same weights with noise."""
    import torch
    from transformers import AutoModelForCausalLM

    from helpers.tiny_models import tiny_llama

    policy = tiny_llama(folder / "policy", seed=0, pad=True)
    reference = tiny_llama(folder / "reference", seed=0, pad=True)
    model = AutoModelForCausalLM.from_pretrained(policy)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(reference)


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
