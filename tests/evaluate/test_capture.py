"""A capture on disk against transformers' own numbers: names, matrices, activations, memory, atomicity, comparison."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import zoo
from helpers.adapter_runs import a_plan, a_run
from helpers.faults import gives, raises_fault
from helpers.plans import choice
from helpers.tiers import representatives
from surefoot.evaluate import capture as stage
from surefoot.evaluate import capture_comparison as capture_pictures
from surefoot.evaluate import capture_tensors as writing
from surefoot.evaluate.capture import capture, compare_folders
from surefoot.evaluate.capture_comparison import compare_captures
from surefoot.evaluate.capture_folder import open_capture
from surefoot.evaluate.loss import read_evaluation_data
from surefoot.families.bos_zero import BOS_FILE
from surefoot.methods.open_model import open_for_use
from surefoot.methods.requests import DataRequest
from surefoot.system.errors import InputError

LENGTH = 24


@pytest.fixture(scope="module", autouse=True)
def few_pictures():
    """Sheets of heat maps take longer than captures; one test draws them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_pictures, "_SHEETS", 0)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return zoo.phi3(tmp_path_factory.mktemp("models") / "phi3", num_hidden_layers=4)


@pytest.fixture(scope="module")
def run(base):
    return a_run(base.parent / "run", base)


@pytest.fixture(scope="module")
def captured(base):
    """With attention maps."""
    return capture(str(base), base.parent / "captured", seq_len=LENGTH, attention=True)


@pytest.fixture(scope="module")
def reference(base, captured):
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    ids = torch.tensor([captured.index["ids"]])
    with torch.no_grad():
        return model, model(ids, output_hidden_states=True, output_attentions=True, use_cache=False)


def test_the_capture_holds_transformers_own_numbers(captured, reference):
    found, (model, out) = open_capture(captured.folder), reference
    assert len(found.ids) == LENGTH
    for layer in range(4):
        name = f"model.layers.{layer}"
        assert torch.equal(found.tensor(f"{name}.residual_in"), out.hidden_states[layer][0])
        assert torch.equal(found.tensor(f"{name}.self_attn.attention"), out.attentions[layer][0])
        fused = model.get_parameter(f"{name}.self_attn.qkv_proj.weight")
        assert torch.equal(found.tensor(f"{name}.self_attn.qkv_proj.weight"), fused)
        q, k, v = fused.split([32, 16, 16])
        for role, matrix in {"q": q, "k": k, "v": v}.items():
            assert torch.equal(found.tensor(f"{name}.self_attn.qkv_proj.{role}.weight"), matrix)
        normed = found.tensor(f"{name}.self_attn.qkv_proj.input")
        # fp32 products of another batch shape may differ in the last bit
        torch.testing.assert_close(found.tensor(f"{name}.self_attn.qkv_proj.k.output"), normed @ k.T)
        norm = model.get_parameter(f"{name}.input_layernorm.weight")
        assert torch.equal(found.tensor(f"{name}.input_layernorm.weight"), norm)
    assert torch.equal(found.tensor("model.norm.output"), out.hidden_states[4][0])


def test_the_index_tells_shape_dtype_layer_and_statistics_of_every_tensor(captured):
    found = open_capture(captured.folder)
    assert found.entries.keys() == {entry["name"] for entry in found.index["tensors"]}
    for name, entry in found.entries.items():
        tensor = found.tensor(name)
        assert list(tensor.shape) == entry["shape"]
        assert str(tensor.dtype) == f"torch.{entry['dtype']}"
        assert (entry["layer"] is None) == (entry["file"] == "final.safetensors")
        assert entry["statistics"]["rms"] == pytest.approx(float(tensor.double().square().mean().sqrt()))
    stream = found.entries["model.layers.2.residual_in"]["statistics"]
    norms = found.tensor("model.layers.2.residual_in").double().norm(dim=-1)
    assert stream["first"]["norm"] == pytest.approx(float(norms[0]))
    assert stream["rest"]["norm"] == pytest.approx(float(norms[1:].mean()))
    maps = found.tensor("model.layers.2.self_attn.attention")
    share = found.entries["model.layers.2.self_attn.attention"]["statistics"]["first_mass"]
    assert share == pytest.approx(float(maps[:, 1:, 0].mean()))


def test_what_modules_share_is_stored_once(base, tmp_path):
    llama = zoo.llama3(tmp_path / "llama")
    found = open_capture(capture(str(llama), tmp_path / "out", seq_len=8).folder)
    entries = [found.entries[f"model.layers.0.self_attn.{name}_proj.input"] for name in "qkv"]
    assert {entry["tensor"] for entry in entries} == {"model.layers.0.input_layernorm.output"}
    stored = load_file(tmp_path / "out" / "layer-00000.safetensors")
    assert "model.layers.0.self_attn.k_proj.input" not in stored
    assert torch.equal(found.tensor("model.layers.0.self_attn.v_proj.input"), stored[entries[0]["tensor"]])


class Watch:
    """The most bytes of captured tensors that were held when a layer was written."""

    def __init__(self, monkeypatch, forget=True):
        self.most = 0
        kept = []

        def save(tensors, path, metadata):
            if not forget:
                kept.append(dict(tensors))
            held = {id(tensor): tensor.nbytes for each in [*kept, tensors] for tensor in each.values()}
            self.most = max(self.most, sum(held.values()))
            save_file(tensors, path, metadata=metadata)

        monkeypatch.setattr(writing, "save_file", save)


def layer_bytes(folder):
    return [sum(one.nbytes for one in load_file(path).values()) for path in sorted(folder.glob("layer-*.safetensors"))]


def test_memory_is_bounded_by_one_layer(base, tmp_path, monkeypatch):
    watch = Watch(monkeypatch)
    found = capture(str(base), tmp_path / "out", seq_len=LENGTH)
    assert found.index["held_bytes_at_most"] == max(layer_bytes(found.folder)) == watch.most
    assert sum(layer_bytes(found.folder)) > 3 * found.index["held_bytes_at_most"]


def test_twin_a_writer_that_forgets_nothing_is_noticed(base, tmp_path, monkeypatch):
    watch = Watch(monkeypatch, forget=False)
    found = capture(str(base), tmp_path / "out", seq_len=LENGTH)
    assert watch.most > 3 * found.index["held_bytes_at_most"]


def test_a_failure_leaves_nothing_and_an_earlier_capture_alone(base, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = capture(str(base), out, seq_len=4)
    monkeypatch.setattr(stage, "_run", lambda opened, ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        capture(str(base), out, seq_len=8, overwrite=True)
    with pytest.raises(ZeroDivisionError):
        capture(str(base), tmp_path / "new", seq_len=8)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert open_capture(out).ids == first.index["ids"]


def test_an_adapter_is_captured_with_its_effective_matrices(base, run, captured, tmp_path):
    found = capture(str(base), tmp_path / "out", adapter=str(run), against=captured.folder)
    entries = {entry["name"]: entry for entry in found.index["tensors"]}
    name = "model.layers.1.mlp.down_proj.weight"
    assert entries[name]["statistics"]["weights"] == "effective"
    difference = next(one for one in found.comparison.differences if one.name == name)
    assert difference.relative == pytest.approx(entries[name]["statistics"]["change"])
    assert difference.relative > 0
    assert entries["model.layers.1.input_layernorm.weight"]["statistics"]["weights"] == "base"
    first = next(one for one in found.comparison.differences if one.name == "model.layers.0.residual_in")
    assert first.equal
    assert first.relative == 0.0
    later = [one for one in found.comparison.differences if one.name == "model.layers.3.residual_in"]
    assert later[0].relative > 0
    assert any("in " + str(captured.folder) in note for note in found.comparison.notes)  # the maps
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["reference"] == str(captured.folder)


def test_a_scaled_first_token_is_scaled_in_the_capture_and_nowhere_else(base, captured, tmp_path):
    plan = a_plan()
    tokens = replace(plan.tokenizer, bos_scale=choice(0.25), bos_id=1)
    scaled = a_run(tmp_path / "scaled", base, replace(plan, tokenizer=tokens))
    (scaled / BOS_FILE).write_text(json.dumps({"scaling_factor": 0.25}))
    found = open_capture(capture(str(scaled), tmp_path / "out", against=captured.folder).folder)
    name = "model.layers.0.residual_in"
    ours, plain = found.tensor(name), open_capture(captured.folder).tensor(name)
    assert torch.equal(ours[0], plain[0] * 0.25)
    assert torch.equal(ours[1:], plain[1:])
    assert found.index["bos_scale"] == 0.25


def test_a_scaled_token_that_is_no_bos_is_a_caution(base, captured, tmp_path):
    plan = a_plan()
    tokens = replace(plan.tokenizer, bos_scale=choice(0.25), bos_id=1)
    scaled = a_run(tmp_path / "scaled", base, replace(plan, tokenizer=tokens))
    (scaled / BOS_FILE).write_text(json.dumps({"scaling_factor": 0.25}))
    begun = capture(str(scaled), tmp_path / "own", seq_len=8)
    assert not [one for one in begun.cautions if gives(one, 0.25)]  # twin: the first token is BOS
    index = json.loads((begun.folder / "index.json").read_text())
    index["ids"][0] = 9
    (begun.folder / "index.json").write_text(json.dumps(index))
    found = capture(str(scaled), tmp_path / "out", against=begun.folder)
    (caution,) = [one for one in found.cautions if gives(one, 0.25)]
    assert gives(caution, 9)
    assert gives(caution, 1)


def test_two_captures_are_compared_later(base, run, captured, tmp_path):
    later = capture(str(run), tmp_path / "b", seq_len=LENGTH, layers="1,3", dtype="bf16")
    found = compare_folders(captured.folder, later.folder, tmp_path / "c")
    assert {one.layer for one in found.differences} == {1, 3, None}
    (layers,) = [note for note in found.notes if note.startswith("layers 0, 2 ")]
    assert gives(layers, str(captured.folder))
    assert [note for note in found.notes if gives(note, "float32") and gives(note, "bfloat16")]
    assert (tmp_path / "c" / "comparison.png").is_file()


def test_captures_without_common_ground_are_one_line(base, captured, tmp_path):
    other = zoo.phi3(tmp_path / "wide", num_hidden_layers=4, intermediate_size=64)
    both = f"{captured.folder} and {tmp_path / 'out'}"
    with raises_fault("SF-EVALUATE", both, "model.layers.0.mlp.gate_up_proj.output", 96, 128) as seen:
        capture(str(other), tmp_path / "out", against=captured.folder)
    assert isinstance(seen.value, InputError)
    assert not (tmp_path / "out").exists()
    options = ["--text", "--data", "--bos", "--seq-len"]
    with raises_fault("SF-EVALUATE", captured.folder, 24, 8, remedy=options):
        capture(str(base), tmp_path / "out", seq_len=8, against=captured.folder)
    small = capture(str(base), tmp_path / "small", seq_len=8)
    again = [str(small.folder), "--against", str(captured.folder)]
    with raises_fault("SF-EVALUATE", captured.folder, 24, 8, remedy=again) as seen:
        compare_captures(open_capture(captured.folder), open_capture(small.folder))
    assert not [option for option in options if option in str(seen.value)]  # twin: no option was given here


def with_ids(made, ids):
    return replace(made, index={**made.index, "ids": ids})


def test_a_bos_that_only_one_text_has_is_named(captured):
    plain = open_capture(captured.folder)
    ids = [9, 8, 7, 6]
    both = with_ids(plain, ids), with_ids(plain, [1, *ids[:-1]])
    with raises_fault("SF-EVALUATE", plain.name, "here", 1, "BOS", remedy=["--against", plain.name]):
        compare_captures(*both)
    with raises_fault("SF-EVALUATE", plain.name, "there", 1, "BOS"):
        compare_captures(*reversed(both))
    with raises_fault("SF-EVALUATE", plain.name, 4, "position", 2):
        compare_captures(both[0], with_ids(plain, [9, 8, 5, 6]))  # twin


def test_values_that_are_not_finite_are_named(base, tmp_path):
    broken = zoo.phi3(tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(broken)
    model.model.layers[1].mlp.down_proj.weight.data[0] *= 1e6
    model.save_pretrained(broken)
    half = capture(str(broken), tmp_path / "half", seq_len=8, dtype="fp16").index
    assert "model.layers.1.mlp.down_proj.weight" in half["overflown"]
    assert half["non_finite"] == []
    statistics = {entry["name"]: entry["statistics"] for entry in half["tensors"]}
    assert statistics["model.layers.1.mlp.down_proj.weight"]["abs_max"] > 65_504  # of what was computed


@pytest.mark.parametrize("name", representatives(["opt", "gemma3", "gpt2", "qwen3"], "gpt2"))
def test_other_families(tmp_path, name):
    model = zoo.ZOO[name](tmp_path / name)
    found = open_capture(capture(str(model), tmp_path / "out", seq_len=9, layers="0-1", attention=True).folder)
    kinds = {entry["kind"] for entry in found.entries.values()}
    assert {"residual_in", "residual_out", "weight", "input", "output", "attention"} <= kinds
    roles = {entry["role"] for entry in found.entries.values()}
    assert {"q", "k", "v", "o", "up", "down"} <= roles


def test_texts_of_the_users_own(base, tmp_path):
    (tmp_path / "text.txt").write_text("Herons wait. ")
    found = capture(str(base), tmp_path / "out", seq_len=40, text=tmp_path / "text.txt", layers="0").index
    assert len(found["ids"]) == 40
    assert found["text"]["source"].endswith("text.txt")
    assert found["ids"][20:] != found["ids"][:20]
    rows = [{"instruction": "Say sky.", "output": "sky"}, {"instruction": "Say sky. " * 30, "output": "sky " * 30}]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    found = capture(str(base), tmp_path / "two", seq_len=60, data=str(tmp_path / "data.json"), layers="0").index
    assert len(found["ids"]) == 60
    assert found["text"]["example"] == 1


def test_pictures_are_few_and_of_the_layers_that_were_asked_for(base, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_pictures, "_SHEETS", 2)
    found = capture(str(base), tmp_path / "out", seq_len=12, attention=True)
    assert found.pictures == ("layer-00000.png", "layer-00003.png", "norms.png")
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in found.pictures)


@pytest.fixture(scope="module")
def chat_run(base):
    """A run that was trained with the tokenizer's chat template."""
    plan = a_plan(stop=(AutoTokenizer.from_pretrained(base).eos_token_id,))
    plan = replace(plan, tokenizer=replace(plan.tokenizer, bos_id=1))
    return a_run(base.parent / "chat run", base, plan)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "The sky is blue and the sea is grey. " * 4}) + "\n")
    return str(tmp_path / "texts.jsonl")


def test_a_plain_text_is_captured_as_it_is_by_a_run_with_a_chat_template_too(base, chat_run, texts, tmp_path):
    ids = capture(str(chat_run), tmp_path / "out", seq_len=12, data=texts, layers="0").index["ids"]
    text = AutoTokenizer.from_pretrained(base).decode(ids)
    assert "The sky is blue" in text
    assert "<|user|>" not in text


def test_twin_a_loss_is_not_measured_on_another_layout_than_the_trained_one(chat_run, texts):
    with raises_fault("SF-DATA-ROW", f"{texts}:1", remedy=["--template", "plain"]):
        read_evaluation_data(open_for_use(str(chat_run)), DataRequest(texts))
