"""The card: its code runs, its links and header are well formed, and it tells nothing that is not so."""

import contextlib
import dataclasses
import io
import re

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.faults import lines_giving
from helpers.plans import adapter_plan, choice, run_plan
from helpers.tiny_models import tiny_llama
from surefoot.report.cards import run as card_module
from surefoot.report.cards.run import CardFacts, DataFile, model_card, usage_code, without_paths

PAD = "<|pad|>"
ROWS = 329  # of the tiny model's embedding


def make_facts(**changes):
    plan = changes.pop("plan", run_plan(trainable=4_096, parameters=30_000, adapter=adapter_plan(["q_proj"], rank=4)))
    facts = CardFacts(
        name="llama3-lora",
        stage="sft",
        base="meta-llama/Llama-3.1-8B",
        base_is_hub_id=True,
        base_revision="0e9e39f249a16976918f6564b8830bc894c89659",
        plan=plan,
        settings={"learning rate": "0.0002", "duration": "3 epochs", "seed": "42"},
        data=(DataFile("training", "alpaca.json", "ab" * 32, 999, 990, 120_000, 40_000),),
        results={"train_loss": 1.25, "eval_loss": 1.31, "eval_accuracy": 0.612, "perplexity": None, "epoch": 3.0},
        versions={"torch": "2.13.0", "surefoot": "0.1.0"},
        hardware="Intel Xeon, 2 threads, 8.2 GB",
        plots=("training_loss.png",),
    )
    return dataclasses.replace(facts, **changes)


def with_added_row(plan):
    tokens = dataclasses.replace(plan.tokenizer, pad_token=choice(PAD), pad_id=ROWS, added_rows=1)
    return dataclasses.replace(plan, tokenizer=tokens)


def with_scaled_bos(plan, scale=0.1):
    return dataclasses.replace(plan, tokenizer=dataclasses.replace(plan.tokenizer, bos_scale=choice(scale)))


def full_plan():
    return run_plan(trainable=30_000, parameters=30_000)


def lint(card):
    """Everything that is wrong with a card."""
    faults = []
    _, header, body = card.split("---\n", 2)
    if "None" in card or "nan" in body.split():
        faults.append("None")
    if re.search(r"(?<![\w/.:])/\w+/\w+|[A-Z]:\\\w", body):
        faults.append("absolute path")
    if "license" in (yaml.safe_load(header) or {}):
        faults.append("licence")
    link = r"https://huggingface\.co/[\w.-]+/[\w.-]+|[\w-]+\.png"
    faults += [f"link {target}" for target in re.findall(r"\]\((.*?)\)", body) if not re.fullmatch(link, target)]
    faults += [f"table {line}" for line in body.splitlines() if line.startswith("| ") and not line.endswith(" |")]
    for table in re.findall(r"(?:^\|.*\|\n)+", body, re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        if len(columns) != 1:
            faults.append(f"columns {table}")
    return faults


CASES = {
    "adapter of a hub model": make_facts(),
    "adapter of a local model": make_facts(base="/home/me/models/base/", base_is_hub_id=False, base_revision=None),
    "full": make_facts(plan=full_plan(), base_revision=None),
    "added row": make_facts(plan=with_added_row(make_facts().plan)),
    "scaled BOS": make_facts(plan=with_scaled_bos(make_facts().plan)),
    "no figures": make_facts(results={}, plots=(), data=(), versions={}),
}


@pytest.mark.parametrize("facts", CASES.values(), ids=CASES.keys())
def test_lint(facts):
    assert lint(model_card(facts)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda card: card + "base None\n",
        lambda card: card + "read from /home/me/data/x.json\n",
        lambda card: card.replace("https://huggingface.co/", "https://huggingface.co//"),
        lambda card: card.replace("&lt;\\|end", "<|end"),
    ],
)
def test_twin_the_lint_sees_each_fault(change):
    card = model_card(make_facts())
    assert change(card) != card
    assert lint(change(card))


def test_the_header():
    def header(facts):
        return yaml.safe_load(model_card(facts).split("---\n")[1])

    assert header(make_facts()) == {
        "library_name": "peft",
        "base_model": "meta-llama/Llama-3.1-8B",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-generation",
        "tags": ["surefoot", "sft", "lora"],
    }
    local = header(make_facts(base="models/base", base_is_hub_id=False))
    assert "base_model" not in local
    assert header(make_facts(plan=full_plan()))["library_name"] == "transformers"


def test_what_it_tells():
    card = model_card(make_facts())
    base = "[meta-llama/Llama-3.1-8B](https://huggingface.co/meta-llama/Llama-3.1-8B)"
    assert lines_giving(card, "LoRA", 4, base)
    assert lines_giving(card, "4,096", "34,096")
    assert f"| training | alpaca.json | 999 | 990 | 120,000 | 40,000 | `{'ab' * 32}` |" in card
    assert lines_giving(card, "accuracy", "61.2%")
    assert "perplexity" not in card
    pad = make_facts().plan.tokenizer.pad_token
    assert (pad.value, " | &lt;\\|end_of_text\\|> | " in card) == ("<|end_of_text|>", True)
    assert f" | {pad.reason} |" in card
    assert "![training loss](training_loss.png)" in card


def test_empty_sections_are_left_out():
    card = model_card(CASES["no figures"])
    assert "## Data" not in card
    assert "## Results" not in card
    assert "## Training" in card


def test_a_scaled_bos_is_told_with_the_line_that_applies_it():
    card = model_card(CASES["scaled BOS"])
    assert lines_giving(card, 0.1, "`bos_zero_config.json`")
    assert " | 0.1 |" in card
    for plan in (make_facts().plan, full_plan()):
        assert "surefoot.install_bos_scaling(model, 0.0)\n" in usage_code(make_facts(plan=with_scaled_bos(plan, 0.0)))
    assert "bos" not in usage_code(make_facts())  # twin: without a factor nothing is said
    assert "bos_zero_config.json" not in model_card(make_facts())


def test_a_local_base_is_named_without_its_folder():
    card = model_card(make_facts(base="/home/me/models/base", base_is_hub_id=False, base_revision=None))
    assert "`base`" in card
    assert "/home/me" not in card


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the folder /home/me/models/base holds it", "the folder base holds it"),
        ("C:\\Users\\me\\data.json", "data.json"),
        ("3,512 tok/s and/or data/alpaca.json", "3,512 tok/s and/or data/alpaca.json"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b"),
    ],
)
def test_without_paths(text, expected):
    assert without_paths(text) == expected


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("models") / "base")


def run_usage(facts, base, monkeypatch, run):
    """Execute the card's code as a user would: in the folder of the card, with the base's folder filled in."""
    code = usage_code(facts).replace("'base'", repr(str(base)))
    monkeypatch.chdir(run)
    torch.manual_seed(0)
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return names, out.getvalue()


def save_adapter_run(base, run, added=False):
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    assert len(tokenizer) == model.config.vocab_size == ROWS
    if added:
        tokenizer.add_special_tokens({"pad_token": PAD})
        model.resize_token_embeddings(len(tokenizer))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(run, save_embedding_layers=added)
    tokenizer.save_pretrained(run)
    return model.eval()


@pytest.mark.parametrize("added", [False, True])
def test_the_code_loads_an_adapter_and_answers(tmp_path, base, monkeypatch, added):
    trained = save_adapter_run(base, tmp_path, added)
    facts = make_facts(base=str(base), base_is_hub_id=False, base_revision=None)
    facts = dataclasses.replace(facts, plan=with_added_row(facts.plan)) if added else facts
    names, said = run_usage(facts, base, monkeypatch, tmp_path)
    assert said.endswith("\n")
    assert names["inputs"]["input_ids"].shape[1] < names["output"].shape[1]
    ids = names["inputs"]["input_ids"]
    assert torch.equal(names["model"](ids).logits, trained(ids).logits)


def test_twin_without_the_resize_an_added_row_does_not_load(tmp_path, base, monkeypatch):
    save_adapter_run(base, tmp_path, added=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run_usage(make_facts(base=str(base), base_is_hub_id=False), base, monkeypatch, tmp_path)


def test_the_code_loads_a_full_model_and_answers(tmp_path, base, monkeypatch):
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    names, _ = run_usage(make_facts(plan=full_plan()), base, monkeypatch, tmp_path)
    assert names["model"].config.model_type == "llama"


@pytest.mark.parametrize("question", ["Who is it?", 'Say "yes" \\ or no – ⟦¿?', "{name}"])
def test_the_question_comes_out_as_it_went_in(tmp_path, base, monkeypatch, question):
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    names, _ = run_usage(make_facts(plan=full_plan(), question=question), base, monkeypatch, tmp_path)
    assert names["messages"][0]["content"] == question


def test_a_run_without_a_chat_template_shows_its_prompt(tmp_path, base, monkeypatch):
    for path in base.iterdir():
        if path.name != "chat_template.jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    prompt = "<|begin_of_text|>### Instruction:\nSay 'yes'.\n\n### Response:\n"
    names, _ = run_usage(make_facts(plan=full_plan(), prompt=prompt), base, monkeypatch, tmp_path)
    tokenizer = names["tokenizer"]
    assert tokenizer.decode(names["inputs"]["input_ids"][0]) == prompt
    assert (names["inputs"]["input_ids"] == tokenizer.bos_token_id).sum() == 1


def test_no_token_is_a_picture():
    assert card_module._cell("![seen](https://elsewhere/a.png)") == "!\\[seen](https://elsewhere/a.png)"


def test_a_base_in_few_bits_is_written_out_first():
    facts = make_facts(base="/home/me/models/base", base_is_hub_id=False, base_revision=None, stored_form="GPTQ")
    (said,) = lines_giving(model_card(facts), "GPTQ")
    assert "surefoot export" in said
    for plain in (dataclasses.replace(facts, stored_form=""), dataclasses.replace(facts, merged=True)):
        assert not lines_giving(model_card(plain), "GPTQ")
