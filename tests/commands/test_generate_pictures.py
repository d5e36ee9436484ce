"""`surefoot generate --image` and `/image` in a chat: answers to pictures are transformers' own."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForImageTextToText

from helpers.faults import prints_fault
from helpers.seeing import picture, seeing
from helpers.seeing_families import seeing_family
from helpers.tiers import representatives
from surefoot.commands.main import main
from surefoot.data.formats import IMAGE, Turn
from surefoot.methods.open_model import open_for_use, question_of
from surefoot.system.messages import clean

TOKENS = 6
QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
OTHERS = ("gemma3", "llava", "smolvlm", "mistral3", "gemma3n", "gemma4_unified", "lfm2_vl", "llama4")
EACH = representatives([*QWEN, *OTHERS], "qwen2_5_vl", "gemma3")


def call(*arguments: object, stdin: str = "") -> list[str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def base_of(name: str, folder: Path) -> Path:
    """With weights that let answers vary."""
    base = seeing(name, folder / "base") if name in QWEN else seeing_family(name, folder / "base")
    model = AutoModelForImageTextToText.from_pretrained(base)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data *= 3
    model.save_pretrained(base)
    return base


def pictures_in(folder: Path) -> list[Path]:
    paths = [folder / "red.png", folder / "blue.png"]
    for path, size in zip(paths, ((56, 84), (112, 56)), strict=True):
        picture(path, path.stem, size)
    return paths


def theirs(base: Path, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """transformers' own greedy answer to what the model is given, and its ids."""
    opened = open_for_use(str(base))
    question = question_of(opened, turns)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    ids = torch.tensor([question.ids])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **(question.pictures or {}),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=list(opened.template.stop_ids),
        pad_token_id=opened.pad_id,
    )
    return question.ids, out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", EACH)
def test_an_answer_to_pictures_is_that_of_transformers(name, tmp_path):
    base, (red, blue) = base_of(name, tmp_path), pictures_in(tmp_path)
    opened = open_for_use(str(base))
    for text, images in {
        "Which?": (red,),
        "First <image> or <image>?": (red, blue),
    }.items():
        content = text.replace("<image>", IMAGE) if "<image>" in text else IMAGE + text
        _, answer = theirs(base, [Turn("user", content, images=tuple(map(str, images)))])
        options = [word for image in images for word in ("--image", image)]
        line = call("generate", base, *options, "--prompt", text, "--max-new-tokens", TOKENS, "--json")[0]
        ids = [one for one in answer if one not in opened.template.stop_ids]
        assert json.loads(line)["answer"] == opened.tokenizer.decode(ids, skip_special_tokens=True)
        assert json.loads(line)["tokens"] == len(ids)


def test_a_chat_keeps_its_pictures_and_each_prompt_has_its_own(tmp_path):
    base, (red, blue) = base_of("qwen2_5_vl", tmp_path), pictures_in(tmp_path)
    typed = f"/image {red}\nWhich?\n/image {blue}\nAnd this?\n"
    first, second = call("chat", base, "--max-new-tokens", TOKENS, stdin=typed)
    one = Turn("user", f"{IMAGE}Which?", images=(str(red),))
    alone = call("generate", base, "--image", red, "--prompt", "Which?", "--max-new-tokens", TOKENS)
    assert alone == [first]
    opened = open_for_use(str(base))
    said = str(opened.tokenizer.decode(theirs(base, [one])[1], skip_special_tokens=True))
    _, answer = theirs(base, [one, Turn("assistant", said), Turn("user", f"{IMAGE}And this?", images=(str(blue),))])
    assert second == clean(str(opened.tokenizer.decode(answer, skip_special_tokens=True)))
    others = call("generate", base, "--image", blue, "--prompt", "Which?", "--max-new-tokens", TOKENS)
    assert others != alone  # the twin: it is the picture that is asked about


@pytest.mark.parametrize("lost", ["missing", "raw", "places"])
def test_pictures_that_cannot_be_shown_are_one_line(tmp_path, lost):
    base, (red, _) = seeing("qwen2_5_vl", tmp_path / "base"), pictures_in(tmp_path)
    options = {
        "missing": ["--image", str(tmp_path / "none.png"), "--prompt", "Which?"],
        "raw": ["--image", str(red), "--prompt", "Which?", "--raw"],
        "places": ["--image", str(red), "--prompt", "<image> or <image>?"],
    }[lost]
    result = CliRunner().invoke(main, ["generate", str(base), *options])
    assert result.exit_code == 2
    if lost == "missing":
        assert prints_fault(result.stderr, "SF-DATA-PICTURE", "prompt")
