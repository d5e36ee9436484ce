"""Language models in a wrapper, beside transformers' own class and PEFT: the tower stays, the language model trains."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from helpers.faults import raises_fault
from helpers.model_layouts import run_config
from helpers.tiers import representatives
from helpers.wrappers import MTP, WRAPPERS, wrapper
from surefoot.data.batching.batch import IGNORE, Example, collate, pack
from surefoot.methods.losses.sft import sft_loss
from surefoot.models import load
from surefoot.models.adapters import add_adapter
from surefoot.models.decoder import decoder_layers
from surefoot.models.facts import facts_of
from surefoot.models.fast.packing import documents_fault, packed_attention
from surefoot.models.forward import hidden_states, model_inputs
from surefoot.models.load import load_model
from surefoot.models.merge import merge_adapter
from surefoot.models.save import save_adapter, save_full
from surefoot.models.verify import verify_head
from surefoot.models.wrapped import wrapper_parameters
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.notes import Notes

CPU = torch.device("cpu")
# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in these tiny models.
FP32_RELATIVE = 1e-5
IDS = torch.arange(3, 43).reshape(2, 20) * 7 % 300
EACH = representatives(WRAPPERS, "qwen3_5", "qwen2_5_vl", "gemma3", "llama4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = wrapper(name, tmp_path_factory.mktemp("wrappers") / name)
        return made[name]

    return folder


def opened(folder):
    return load_model(folder, dtype=torch.float32, attention_implementation="sdpa", device=CPU)


def theirs(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def logits(model, ids=IDS):
    return model.eval()(input_ids=ids, use_cache=False).logits


def adapted(folder, kind="lora"):
    """An adapter on all that `all-linear` means, moved away from its start."""
    notes = Notes()
    model = opened(folder)
    experts = {"experts": False} if kind == "dora" else {}
    plan = plan_adapter(run_config(adapter={"kind": kind, "rank": 2} | experts).adapter, facts_of(folder), 0, notes)
    model = add_adapter(model, plan, seed=1, base="org/base").eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model, plan


@pytest.mark.parametrize("name", EACH)
def test_what_trains_is_the_language_model_and_what_is_planned(folders, name, monkeypatch):
    facts, model = facts_of(folders(name)), opened(folders(name))
    sides = {True: 0, False: 0}
    for parameter in model.parameters():
        sides[parameter.requires_grad] += parameter.numel()
    assert (facts.parameters, facts.wrapper_parameters) == (sides[True], sides[False])
    assert facts.wrapper_parameters == sum(parameter.numel() for parameter in wrapper_parameters(model).values()) > 0
    assert facts.opened_by == "AutoModelForImageTextToText"
    assert facts.layers == len(decoder_layers(model))
    assert verify_head(model, CPU) <= FP32_RELATIVE
    names = dict(model.named_modules())
    assert names[facts.embedding] is model.get_input_embeddings()
    assert names[facts.head] is model.get_output_embeddings()
    monkeypatch.setattr(load, "freeze_wrapper", lambda model: None)  # twin: a tower that trains
    assert all(parameter.requires_grad for parameter in opened(folders(name)).parameters())


@pytest.mark.parametrize("name", EACH)
def test_loss_and_gradients_are_those_of_the_whole_checkpoint(folders, name):
    model, reference = opened(folders(name)), theirs(folders(name))
    assert torch.equal(logits(model), logits(reference))
    ids = IDS[0].numpy()
    batch = collate([Example(ids, ids > 150, 0)], pad_id=0)
    labels = torch.cat((torch.full((1, 1), IGNORE), batch.targets[:, :-1]), dim=1)
    expected = reference(input_ids=batch.input_ids, labels=labels).loss
    expected.backward()
    found = sft_loss(model, batch).loss / batch.weight
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=FP32_RELATIVE)
    wanted = {key: one.grad for key, one in reference.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in wanted.values())
    for key, parameter in model.named_parameters():
        if key in wanted and parameter.requires_grad:
            assert float((parameter.grad - wanted[key]).abs().max()) <= FP32_RELATIVE * largest, key
    assert not any(
        one.abs().max() for key, one in wanted.items() if key in wrapper_parameters(reference)
    )  # text reaches none of it


@pytest.mark.parametrize("name", EACH)
def test_the_whole_wrapper_is_saved_and_all_beside_the_language_model_bit_for_bit(folders, name, tmp_path):
    model = opened(folders(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.01)
    save_full(model, tmp_path)
    before, after = load_file(folders(name) / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    kept = {key for key in before if before[key].dtype == after[key].dtype and torch.equal(before[key], after[key])}
    kept -= {key for key, _ in model.named_buffers()}  # Gemma 4's layer_scalar
    assert len(kept) == len(wrapper_parameters(model)) + (len(MTP) if name == "qwen3_5" else 0)
    again = theirs(tmp_path)
    assert all(torch.equal(one, dict(model.named_parameters())[key]) for key, one in again.named_parameters())
    assert torch.equal(logits(again), logits(model))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(model).__name__]


def test_heads_that_transformers_does_not_know_are_kept_to_the_last_bit(folders, tmp_path):
    model = opened(folders("qwen3_5"))
    save_full(model, tmp_path / "kept")
    found = load_file(tmp_path / "kept" / "model.safetensors")
    stored = load_file(folders("qwen3_5") / "model.safetensors")
    assert all(found[key].dtype == torch.bfloat16 and torch.equal(found[key], stored[key]) for key in MTP)
    model._left_out = {}  # twin: what transformers does by itself
    save_full(model, tmp_path / "lost")
    assert not load_file(tmp_path / "lost" / "model.safetensors").keys() & MTP.keys()


@pytest.mark.parametrize("name", EACH)
def test_an_adapter_is_on_the_language_model_alone_and_peft_puts_it_onto_the_wrapper(folders, name, tmp_path):
    model, plan = adapted(folders(name))
    others = {key.rpartition(".")[0] for key in wrapper_parameters(model.get_base_model())}
    assert not others & set(plan.targets.value)
    trained = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    assert sum(dict(model.named_parameters())[key].numel() for key in trained) == plan.trainable
    save_adapter(model, tmp_path, save_embedding=False)
    place = facts_of(folders(name)).embedding.rpartition(".")[0]
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(key.startswith(f"base_model.model.{place}.") for key in saved)
    again = PeftModel.from_pretrained(theirs(folders(name)), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))


def test_an_adapter_under_another_prefix_does_nothing_and_is_noticed(folders, tmp_path):
    """What a server does without a word when the prefix is that of the text model alone (vLLM issue 34186)."""
    model, _ = adapted(folders("qwen3_5"))
    save_adapter(model, tmp_path, save_embedding=False)
    file = tmp_path / "adapter_model.safetensors"
    save_file({key.replace(".language_model.", "."): one for key, one in load_file(file).items()}, file)
    again = PeftModel.from_pretrained(theirs(folders("qwen3_5")), tmp_path).eval()
    assert not torch.equal(logits(again), logits(model))
    assert torch.equal(logits(again), logits(theirs(folders("qwen3_5"))))


@pytest.mark.parametrize(("name", "kind"), [("qwen3_5", "lora"), ("gemma3", "dora"), ("llama4", "lora")])
def test_merged_it_is_a_wrapper_again(folders, name, kind, tmp_path):
    model, _ = adapted(folders(name), kind)
    wanted = logits(model)
    save_full(merge_adapter(model).model, tmp_path)
    found = logits(theirs(tmp_path))
    assert float((found - wanted).abs().max()) <= FP32_RELATIVE * float(wanted.abs().max())
    base = logits(theirs(folders(name)))
    assert float((base - wanted).abs().max()) > 1e-2 * float(wanted.abs().max())  # twin: the adapter does something


@pytest.mark.parametrize("name", EACH)
def test_positions_of_packed_and_padded_rows_are_those_of_each_text_alone(folders, name):
    model = opened(folders(name)).eval()
    examples = [
        Example(row[:size].numpy(), row[:size].numpy() > 150, 0) for row, size in zip(IDS, (16, 9), strict=True)
    ]
    alone = [logits(model, torch.from_numpy(one.ids)[None])[0] for one in examples]
    largest = max(float(one.abs().max()) for one in alone)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :7] = 0
    rows = torch.stack((IDS[0, :16], torch.cat((torch.zeros(7, dtype=torch.long), IDS[1, :9]))))
    batch = SimpleNamespace(input_ids=rows, attention_mask=mask, documents=(), pixels=())
    with torch.no_grad():
        padded = model(**model_inputs(model, batch)).logits
    assert float((padded[1, 7:] - alone[1]).abs().max()) <= FP32_RELATIVE * largest
    if documents_fault(model):
        assert name in ("qwen3_5", "qwen3_5_moe", "llama4", "lfm2_vl")  # states and chunks know nothing of documents
        return
    undo = packed_attention("sdpa").install(model)
    with torch.no_grad():
        packed = model.get_output_embeddings()(hidden_states(model, pack(examples)))[0]
    undo()
    if not name.startswith(("gemma3n", "gemma4")):  # which cap their logits behind the head
        assert float((packed[:25] - torch.cat(alone)).abs().max()) <= FP32_RELATIVE * largest


ROWS = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen2_5_vl": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "gemma3": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4",
    "mistral3": "mistral",
    "mllama": "mllama",
    "llama4": "llama4",
    "glm4v": "glm",
    "glm46v": "glm",
    "internvl": "qwen3",
    "lfm2_vl": "lfm2",
    "paddleocr_vl": "paddleocr_vl",
    "llava": "qwen2",
    "smolvlm": "llama",
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_is_known_by_name_is_of_the_language_model_inside(folders, name):
    found = facts_of(folders(name))
    assert found.family.name == ROWS[name]
    assert found.structure is None  # everything stands behind a prefix
    assert found.model_type == name


def test_what_decodes_from_an_encoder_is_refused(tmp_path):
    fields = {"model_type": "florence2", "text_config": {"model_type": "bart"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with raises_fault("SF-MODEL-KIND", tmp_path / "config.json", "florence2"):
        facts_of(tmp_path)
