"""RLHF on the quickstart's museum: data, a programmatic reward, and what the policy earns before and after.

    python examples/museum.py data FOLDER          # sft.json, prompts.json, held-out.json
    ppo.reward: examples/museum.py:right_room      # 1 for the right room in the right words, else 0
    python examples/museum.py earns SFT_RUN PPO_RUN FOLDER

The museum keeps each of eight groups of things in a room of its own colour. The supervised data teaches how an answer
sounds ("In the red room.") and nothing about rooms: their colours are drawn by lot. So the supervised policy guesses,
and is right once in eight times. No answer key is ever shown to PPO: what it knows of the rooms comes from the reward.
Held out are questions about things that no prompt names.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from statistics import mean, pstdev

from surefoot.commands.quickstart.world import GROUPS, ROOMS, instructions, museum

MUSEUM = 1  # which of the quickstart's museums
ROOM_OF = {thing: museum(MUSEUM)[group.name] for group in GROUPS for thing in group.things}
LONGEST_FIRST = sorted(ROOM_OF, key=len, reverse=True)
THING = re.compile(rf"\b({'|'.join(map(re.escape, LONGEST_FIRST))})\b")


def right_room(prompts: list[str], responses: list[str]) -> list[float]:
    """1 where the answer is, letter by letter, the room of the thing that the prompt asks about; else 0."""
    return [
        float(response.strip() == f"In the {ROOM_OF[THING.findall(prompt)[-1]]} room.")
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def write_data(folder: Path) -> None:
    train, held_out = instructions(MUSEUM)
    lot = random.Random("rooms by lot")
    by_lot = [{**record, "output": f"In the {ROOMS[int(lot.random() * len(ROOMS))]} room."} for record in train]
    questions = [[{key: one[key] for key in ("instruction", "input")} for one in part] for part in (train, held_out)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("sft", by_lot), ("prompts", questions[0]), ("held-out", questions[1])):
        (folder / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n")


def earnings(run: str, questions: list[dict[str, str]], seed: int = 0) -> list[float]:
    """The reward of one answer to each question, drawn at temperature 1 as in PPO."""
    from surefoot.data.formats import Turn
    from surefoot.methods.open_model import conversation_ids, open_for_use
    from surefoot.models.generate import generate_answers

    opened = open_for_use(run)
    prompts = [conversation_ids(opened, [Turn("user", one["instruction"], one["input"])]) for one in questions]
    with opened.context():
        answers = generate_answers(
            opened.model,
            opened.tokenizer,
            prompts,
            max_new_tokens=10,
            stop_ids=opened.template.stop_ids,
            pad_id=opened.pad_id,
            temperature=1.0,
            seed=seed,
        )
    texts = [f"{one['instruction']} {one['input']}" for one in questions]
    return right_room(texts, [answer.text for answer in answers])


def compare(before: str, after: str, folder: Path) -> bool:
    """Print what both earn; whether the mean rose by two standard deviations of what was earned before."""
    rose = False
    for name in ("prompts", "held-out"):
        questions = json.loads((folder / f"{name}.json").read_text())
        old, new = earnings(before, questions), earnings(after, questions)
        by = (mean(new) - mean(old)) / pstdev(old)
        print(
            f"{name} ({len(questions)}): mean reward {mean(old):.3f} (deviation {pstdev(old):.3f}) -> {mean(new):.3f}, "
            f"{by:.2f} deviations"
        )
        rose = rose or (name == "prompts" and by >= 2)
    return rose


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["data", folder]:
            write_data(Path(folder))
        case ["earns", before, after, folder]:
            sys.exit(0 if compare(before, after, Path(folder)) else 1)
        case _:
            sys.exit(__doc__)
