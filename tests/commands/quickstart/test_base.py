"""The shipped base: made by the script in the repository, what its card says, at chance before fine-tuning."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import build_quickstart_base as script
from surefoot.commands.quickstart import world

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "tools" / "build_quickstart_base.py"
LARGEST_BASE = 10_000_000  # bytes; promised by the documentation


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(world.base_folder())


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(world.base_folder(), dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model


def test_the_files_are_those_of_the_manifest():
    manifest = (REPOSITORY / "docs" / "quickstart-base.md").read_text(encoding="utf-8")
    shipped = digests(world.base_folder())
    assert set(shipped) >= {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "README.md"}
    for name, digest in shipped.items():
        assert name == "README.md" or f"`{digest}` | `{name}`" in manifest, name


def test_the_base_is_small():
    assert sum(path.stat().st_size for path in world.base_folder().iterdir()) <= LARGEST_BASE


def test_every_weight_is_finite():
    weights = load_file(world.base_folder() / "model.safetensors")
    assert all(tensor.dtype == torch.float32 and bool(tensor.isfinite().all()) for tensor in weights.values())


def test_the_tokenizer_is_the_one_that_the_text_gives(tmp_path: Path):
    script.build_tokenizer(list(script.pretraining_text())).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        made, shipped = (json.loads((folder / name).read_text()) for folder in (tmp_path, world.base_folder()))
        assert made == shipped, name
    template = "chat_template.jinja"
    assert (tmp_path / template).read_text() == (world.base_folder() / template).read_text()


def test_twin_another_text_gives_another_tokenizer():
    made = script.build_tokenizer(list(script.pretraining_text(seed=2))[:500])
    shipped = json.loads((world.base_folder() / "tokenizer.json").read_text())
    assert json.loads(made.backend_tokenizer.to_str())["model"]["merges"] != shipped["model"]["merges"]


def test_conversations_start_with_one_bos_and_every_turn_ends_with_the_stop_token(tokenizer):
    turns = [
        {"role": "user", "content": "Where is the heron?"},
        {"role": "assistant", "content": "In the red room."},
        {"role": "user", "content": "Where is the oak?"},
    ]
    ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == len(turns)
    assert tokenizer("A heron").input_ids.count(tokenizer.bos_token_id) == 1


def test_a_prompt_is_the_beginning_of_its_conversation(tokenizer):
    question = [{"role": "user", "content": "Where is the heron?"}]
    answer = [{"role": "assistant", "content": "In the red room."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=True, return_dict=False)
    whole = tokenizer.apply_chat_template(question + answer, tokenize=True, return_dict=False)
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]) == "In the red room.<|end|>"


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(TemplateError):
        tokenizer.apply_chat_template([{"role": "tool", "content": "1"}], tokenize=False)


def test_text_cannot_contain_the_padding_token_by_accident(tokenizer):
    assert tokenizer.pad_token_id not in {tokenizer.eos_token_id, tokenizer.bos_token_id, 0}


def test_the_base_knows_its_facts(base: LlamaForCausalLM, tokenizer):
    assert script.knowledge(base, tokenizer) == 1.0


def test_twin_an_untrained_model_knows_nothing(tokenizer):
    assert script.knowledge(script.build_model(tokenizer), tokenizer) < 0.3


def test_building_twice_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "THREADS", torch.get_num_threads())  # those of this test process, which others share
    documents = list(script.pretraining_text())[: 3 * script.BATCH]
    for folder in ("first", "second"):
        script.build(tmp_path / folder, documents)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")


@pytest.mark.slow
def test_the_whole_base_can_be_rebuilt(tmp_path: Path):
    """Two fresh processes, the same bytes; on another machine than the shipped base's, as good, perhaps not equal."""
    free = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    for folder in ("first", "second"):
        subprocess.run([sys.executable, SCRIPT, "--output", tmp_path / folder], check=True, env=free)
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32)
    assert script.knowledge(model, AutoTokenizer.from_pretrained(tmp_path / "first")) >= 0.99
