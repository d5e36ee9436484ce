"""`surefoot convert` and loading through rules, against transformers and PEFT: the same logits, the same bits."""

import json
import os
import shlex
import shutil
import sys

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.faults import gives, prints_fault
from helpers.stored_forms import in_gptq
from helpers.tiers import diagonal, representatives
from surefoot.commands.main import main
from surefoot.families.bos_zero import bos_file, read_bos_scale
from surefoot.models.facts import facts_of
from surefoot.models.load import load_model
from surefoot.models.saved_adapter import fitted, open_adapter, read_adapter
from surefoot.system.errors import InputError

IDS = torch.arange(40).reshape(2, 20) * 7 % 300
CPU = torch.device("cpu")
FAMILIES = ("llama3", "qwen2", "opt", "phi3", "gpt2")
CLOSE = 1e-5  # a fused product sums in another order than its parts


def call(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


def load(folder, said=None):
    say = said.append if said is not None else None
    return load_model(folder, dtype=torch.float32, attention_implementation="eager", device=CPU, notify=say)


@pytest.fixture(autouse=True)
def _forked(monkeypatch, forked_python):
    """The child that opens pickles; tests/models/convert/test_pickled.py starts a Python of its own."""
    monkeypatch.setattr(sys, "executable", forked_python)


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def layouts_of(folder):
    """What the source of a conversion was recognized as."""
    return json.loads((folder / "convert.json").read_text())["layouts"]


def refused(*arguments):
    """The code of what is refused."""
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return {line.rpartition(" [")[2].removesuffix("]") for line in result.stderr.splitlines()}


def weights(folder):
    return load_file(folder / "model.safetensors")


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    return {name: zoo.ZOO[name](root / name, **({"dropout": 0.0} if name == "opt" else {})) for name in FAMILIES}


@pytest.mark.parametrize("name", representatives(FAMILIES, "llama3", "gpt2"))
def test_every_family_goes_out_loads_and_comes_back(models, tmp_path, name):
    folder = models[name]
    layouts = ["split" if name in ("phi3", "gpt2") else "fused", "transposed"]
    plain = logits(load(folder))
    for layout in layouts:
        out, back = tmp_path / layout, tmp_path / f"{layout}-back"
        done = call(folder, "--to", layout, "--out", out)
        assert done.exit_code == 0
        assert layouts_of(out) == ["hf"]
        assert not equal(weights(out), weights(folder))
        said = []
        assert torch.equal(logits(load(out, said)), plain)
        assert f"({layout})" in said[0]
        again = call(out, "--out", back)
        assert again.exit_code == 0
        assert layouts_of(back) == [layout]  # twin
        assert equal(weights(back), weights(folder))
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(back, attn_implementation="eager")), plain)


def test_twin_a_permuted_matrix_gives_other_logits(models, tmp_path):
    call(models["llama3"], "--to", "fused", "--out", tmp_path / "fused")
    tensors = weights(tmp_path / "fused")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, tmp_path / "fused" / "model.safetensors")
    assert not torch.equal(logits(load(tmp_path / "fused")), logits(load(models["llama3"])))


def test_a_compiled_model_and_a_base_from_under_an_adapter_load(models, tmp_path):
    folder = models["llama3"]
    plain = logits(load(folder))
    compiled = torch.compile(AutoModelForCausalLM.from_pretrained(folder))
    inner = AutoModelForCausalLM.from_pretrained(folder)
    inner.model.layers[0] = torch.compile(inner.model.layers[0])
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["q_proj"]))
    base = {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" not in name}
    for number, state in enumerate((compiled.state_dict(), inner.state_dict(), base)):
        other = tmp_path / str(number)
        shutil.copytree(folder, other)
        save_file({f"module.{name}": tensor.clone() for name, tensor in state.items()}, other / "model.safetensors")
        said = []
        assert torch.equal(logits(load(other, said)), plain)
        assert ("base-layer" in said[0]) == (number == 2)


def test_what_is_missing_or_left_over_is_counted_with_its_first_names(models, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(models["llama3"], other)
    tensors = {f"_orig_mod.{name}": tensor for name, tensor in weights(other).items()}
    del tensors["_orig_mod.model.norm.weight"]
    tensors["_orig_mod.model.extra"] = torch.ones(1)
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(InputError) as caught:
        load(other)
    first, second = caught.value.faults
    assert {first.code, second.code} == {"SF-MODEL-KEYS"} == refused(other, "--out", tmp_path / "out")
    assert ("1 " in first.what, "model.norm.weight" in first.what) == (True, True)
    assert ("1 " in second.what, "model.extra" in second.what) == (True, True)
    assert not (tmp_path / "out").exists()


def test_matrices_there_twice_and_rows_by_head_groups_are_refused(models, tmp_path):
    for name in ("qkv_proj", "query_key_value"):
        other = tmp_path / name
        shutil.copytree(models["llama3"], other)
        tensors = weights(other)
        for layer in range(2):
            front = f"model.layers.{layer}.self_attn"
            parts = [tensors[f"{front}.{part}_proj.weight"] for part in "qkv"]
            tensors[f"{front}.{name}.weight"] = torch.cat(parts)
            if name == "query_key_value":
                for part in "qkv":
                    del tensors[f"{front}.{part}_proj.weight"]
        save_file(tensors, other / "model.safetensors")
        with pytest.raises(InputError) as refused:
            load(other)
        (fault,) = refused.value.faults
        assert fault.code == "SF-CONVERT-LAYOUT"
        assert gives(fault.what, f"model.layers.0.self_attn.{name}.weight")


def old_dora(folder, target):
    """PEFT's DoRA adapter, moved off its start, as DoRA's first code would have left it; its logits in PEFT."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(model, settings).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(target)
    tensors = {}
    for name, tensor in load_file(target / "adapter_model.safetensors").items():
        if name.endswith(".lora_magnitude_vector"):
            name = name.replace(".lora_magnitude_vector", ".weight_m_wdecomp.weight")
            tensor = tensor.reshape(-1, 1)
        tensors[name] = tensor
    (target / "adapter_model.safetensors").unlink()
    torch.save(tensors, target / "adapter_model.bin")
    fields = {
        "peft_type": "DORA",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "down_proj"],
    }
    fields |= {"merge_weights": False, "enable_lora": None, "dora_simple": True, "Wdecompose_target_modules": None}
    fields |= {"base_model_name_or_path": str(folder), "task_type": "CAUSAL_LM", "bias": "none"}
    (target / "adapter_config.json").write_text(json.dumps(fields))
    return logits(model)


def test_an_old_dora_adapter_gives_pefts_logits(models, tmp_path):
    folder = models["llama3"]
    expected = old_dora(folder, tmp_path / "old")
    with pytest.raises(InputError, match=r"surefoot convert .*old --out .*old-safetensors"):
        read_adapter(tmp_path / "old")
    assert call(tmp_path / "old", "--out", tmp_path / "new").exit_code == 0
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "new").eval()), expected)
    for layout in ("old-dora", "live-peft"):  # and read where they lie
        assert call(tmp_path / "new", "--to", layout, "--out", tmp_path / layout).exit_code == 0
        saved = read_adapter(tmp_path / layout)
        assert layout in saved.layouts
        assert torch.equal(logits(open_adapter(load(folder), saved)), expected)
    tensors = load_file(tmp_path / "old-dora" / "adapter_model.safetensors")  # twin: another magnitude
    name = next(name for name in tensors if "weight_m" in name)
    save_file({**tensors, name: tensors[name] * 1.5}, tmp_path / "old-dora" / "adapter_model.safetensors")
    assert not torch.equal(logits(open_adapter(load(folder), read_adapter(tmp_path / "old-dora"))), expected)


@pytest.mark.parametrize("dora", representatives([False, True], True))
def test_an_adapter_on_split_matrices_works_over_a_fused_base_and_back(models, tmp_path, dora):
    """Phi-3's own adapter on qkv_proj, split and put together again, and one whose parts differ."""
    folder = models["phi3"]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    settings = LoraConfig(task_type="CAUSAL_LM", r=6, lora_alpha=16, use_dora=dora, target_modules=["qkv_proj"])
    model = get_peft_model(model, settings).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "own")
    expected = logits(model)
    out = tmp_path / "split"
    assert call(tmp_path / "own", "--to", "split", "--base", folder, "--out", out).exit_code == 0
    assert json.loads((out / "adapter_config.json").read_text())["target_modules"] == ["k_proj", "q_proj", "v_proj"]
    saved = fitted(read_adapter(out), facts_of(folder))
    assert torch.equal(logits(open_adapter(load(folder), saved)), expected)
    tensors = load_file(out / "adapter_model.safetensors")
    for name in tensors:  # three different A: the fused rank is their sum
        if "k_proj.lora_A" in name:
            tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, out / "adapter_model.safetensors")
    stacked = fitted(read_adapter(out), facts_of(folder))
    assert stacked.settings["rank_pattern"] == {"qkv_proj": 18}
    assert stacked.settings["alpha_pattern"] == {"qkv_proj": 48}
    found = logits(open_adapter(load(folder), stacked))
    assert not torch.allclose(found, expected, atol=CLOSE)
    split_model = open_split(folder, tmp_path, out)
    torch.testing.assert_close(found, split_model, atol=CLOSE, rtol=CLOSE)


def peft_adapter(folder, target, *, dora=False, move=True, **settings):
    """As PEFT saves it, moved off its start; its logits in PEFT."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=dora, **settings)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad and move:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(target)
    return logits(model)


def adapter_weights(folder):
    return load_file(folder / "adapter_model.safetensors")


LINEAR = {"llama3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"], "phi3": ["qkv_proj", "o_proj"]}


@pytest.mark.parametrize(("to", "dora"), diagonal(["live-peft", "fused", "old-dora", "split"], [False, True]))
def test_an_adapter_goes_out_opens_and_comes_back(models, tmp_path, to, dora):
    name = "phi3" if to == "split" else "llama3"
    folder = models[name]
    expected = peft_adapter(folder, tmp_path / "own", dora=dora, target_modules=LINEAR[name])
    own, out = tmp_path / "own", tmp_path / "out"
    assert call(own, "--to", to, "--base", folder, "--out", out).exit_code == 0
    saved = fitted(read_adapter(out), facts_of(folder))
    assert torch.equal(logits(open_adapter(load(folder), saved)), expected)
    ways = {"peft": []} | ({} if to not in ("fused", "split") else {{"fused": "split", "split": "fused"}[to]: []})
    for way in ways:
        back = tmp_path / f"back-{way}"
        result = call(out, "--to", way, "--base", folder, "--out", back)
        assert result.exit_code == 0, result.stderr
        assert equal(adapter_weights(back), adapter_weights(own))
        before, after = (json.loads((one / "adapter_config.json").read_text()) for one in (own, back))
        assert set(before.pop("target_modules")) == set(after.pop("target_modules"))
        assert before == after


def test_ranks_of_a_pattern_go_with_their_matrix_or_are_refused(models, tmp_path):
    folder, own = models["llama3"], tmp_path / "own"
    patterns = {"rank_pattern": dict.fromkeys(["q_proj", "k_proj", "v_proj"], 2), "alpha_pattern": {"q_proj": 3}}
    peft_adapter(folder, own, target_modules=LINEAR["llama3"], **patterns)
    refused = call(own, "--to", "fused", "--base", folder, "--out", tmp_path / "out")
    assert [part for part in ("alpha_pattern", "q_proj 3", "k_proj 8") if part not in refused.stderr] == []
    patterns["alpha_pattern"] = dict.fromkeys(["q_proj", "k_proj", "v_proj"], 3)
    expected = peft_adapter(folder, own, target_modules=LINEAR["llama3"], **patterns)
    assert call(own, "--to", "fused", "--base", folder, "--out", tmp_path / "out").exit_code == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"qkv_proj": 6, "gate_up_proj": 8}
    assert config["alpha_pattern"] == {"qkv_proj": 9, "gate_up_proj": 16}
    saved = fitted(read_adapter(tmp_path / "out"), facts_of(folder))
    assert torch.equal(logits(open_adapter(load(folder), saved)), expected)
    for rank in (7, 9):  # twin: a pattern that does not fit its tensors
        config["rank_pattern"]["qkv_proj"] = rank
        (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(InputError) as refused:
            open_adapter(load(folder), fitted(read_adapter(tmp_path / "out"), facts_of(folder)))
        assert refused.value.faults[0].code == ("SF-CONVERT-LAYOUT" if rank == 7 else "SF-ADAPTER-FIT")
    path = "model.layers.0.self_attn.q_proj"
    patterns = {"rank_pattern": {path: 2}}
    peft_adapter(folder, own, target_modules=LINEAR["llama3"], **patterns)
    refused = call(own, "--to", "fused", "--base", folder, "--out", tmp_path / "no")
    assert [part for part in ("rank_pattern", path) if part not in refused.stderr] == []


def test_what_there_is_nothing_of_to_change_is_said_truly(models, tmp_path):
    peft_adapter(models["llama3"], tmp_path / "own", target_modules=["o_proj"])
    for to, kind in (("fused", "separate"), ("split", "fused")):
        refused = call(tmp_path / "own", "--to", to, "--base", models["llama3"], "--out", tmp_path / "no")
        assert refused.exit_code == 2
        assert prints_fault(refused.stderr, "SF-CONVERT-LAYOUT", f"--to {to}", kind, "q", "k", "v")


OUT = [("qwen2", "tied-head"), ("gpt2", "tied-head"), ("phi3", "split")]


@pytest.mark.parametrize(("name", "to"), representatives(OUT, *OUT[1:]))
def test_a_model_goes_out_and_comes_back(models, tmp_path, name, to):
    assert call(models[name], "--to", to, "--out", tmp_path / "out").exit_code == 0
    assert weights(tmp_path / "out").keys() != weights(models[name]).keys()
    assert call(tmp_path / "out", "--out", tmp_path / "back").exit_code == 0
    assert equal(weights(tmp_path / "back"), weights(models[name]))


@pytest.mark.parametrize(
    ("trained", "to"), diagonal([["embed_tokens", "norm"], ["mlp"], []], ["peft", "live-peft", "old-dora"])
)
def test_modules_that_trained_in_full_are_part_of_the_adapter(models, tmp_path, trained, to):
    """With `[]` the embedding has a LoRA of its own, and PEFT saves `embed_tokens.base_layer`."""
    folder, own, out = models["llama3"], tmp_path / "own", tmp_path / "out"
    targets = ["q_proj"] if trained else ["q_proj", "embed_tokens"]
    expected = peft_adapter(folder, own, dora=bool(trained), target_modules=targets, modules_to_save=trained or None)
    result = call(own, "--to", to, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert len(adapter_weights(out)) == len(adapter_weights(own))
    if trained:
        assert torch.equal(logits(open_adapter(load(folder), read_adapter(out))), expected)
        assert call(out, "--out", tmp_path / "back").exit_code == 0
        assert equal(adapter_weights(tmp_path / "back"), adapter_weights(own))


def test_twin_a_whole_model_beside_an_adapter_is_two_halves(models, tmp_path):
    folder, both = models["llama3"], tmp_path / "both"
    model = AutoModelForCausalLM.from_pretrained(folder)
    settings = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    adapted = get_peft_model(model, settings)
    adapted.save_pretrained(both)
    state = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    save_file(state, both / "adapter_model.safetensors")
    assert refused(both, "--out", tmp_path / "no") == {"SF-CONVERT-LAYOUT"}
    assert call(both, "--to", "peft", "--out", tmp_path / "out").exit_code == 0
    saved = adapter_weights(tmp_path / "out")
    assert "base_model.model.model.norm.weight" in saved
    assert len(saved) == 9  # PEFT takes layernorms for "norm" too


def test_the_factor_of_the_base_is_not_the_sources(models, tmp_path):
    base, own = tmp_path / "base", tmp_path / "own"
    shutil.copytree(models["llama3"], base)
    shutil.copytree(models["llama3"], own)
    (base / "bos_zero_config.json").write_text(json.dumps(bos_file(0.1)))
    result = call(own, "--to", "fused", "--base", base, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "bos_zero_config.json").exists()
    assert "\nnote: bos_zero_config.json " in result.stdout
    (own / "bos_zero_config.json").write_text(json.dumps(bos_file(0.3)))  # twin: its own is
    result = call(own, "--to", "fused", "--base", base, "--out", tmp_path / "own-out")
    assert read_bos_scale(tmp_path / "own-out") == 0.3
    assert "\nnote: bos_zero_config.json " not in result.stdout


def test_a_bias_that_is_no_mask_is_not_dropped(models, tmp_path):
    tensors = weights(models["gpt2"])
    for shape, dropped in (((96,), False), ((1, 1, 8, 8), True), ((1, 1, 8, 9), False)):
        other = tmp_path / "x".join(map(str, shape))
        shutil.copytree(models["gpt2"], other)
        save_file({**tensors, "transformer.h.0.attn.bias": torch.ones(shape)}, other / "model.safetensors")
        result = call(other, "--out", tmp_path / f"out-{other.name}")
        assert (result.exit_code == 0) is dropped
        if dropped:
            load(other)
            continue
        assert prints_fault(result.stderr, "SF-MODEL-KEYS", other, 1, "transformer.h.0.attn.bias")
        with pytest.raises(InputError, match=r"transformer\.h\.0\.attn\.bias"):
            load(other)


def open_split(folder, tmp_path, adapter):
    """Logits of the split adapter worked into the weights in float64: W' = W + s B A, and DoRA's rows scaled."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = load(folder)
    for layer in range(2):
        matrix = model.get_parameter(f"model.layers.{layer}.self_attn.qkv_proj.weight")
        rows = []
        for part, weight in zip("qkv", matrix.data.double().split([32, 16, 16]), strict=True):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            a, b = (tensors[f"{name}.lora_{letter}.weight"].double() for letter in "AB")
            changed = weight + config["lora_alpha"] / config["r"] * b @ a
            if config["use_dora"]:
                changed *= (tensors[f"{name}.lora_magnitude_vector"].double() / changed.norm(dim=1))[:, None]
            rows.append(changed)
        matrix.data = torch.cat(rows).float()
    return logits(model)


def test_a_deepspeed_chat_reward_model_becomes_a_base_and_a_value_head_and_back(models, tmp_path):
    folder, chat = models["opt"], tmp_path / "chat"
    shutil.copytree(folder, chat)
    (chat / "model.safetensors").unlink()
    own = {"rwtransformer." + name.removeprefix("model."): one for name, one in weights(folder).items()}
    own = {name: one for name, one in own.items() if "lm_head" not in name}
    own["v_head.weight"] = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    torch.save(own, chat / "pytorch_model.bin")
    assert call(chat, "--out", tmp_path / "hf").exit_code == 0
    assert torch.equal(logits(load(tmp_path / "hf")), logits(load(folder)))
    head = load_file(tmp_path / "hf" / "value_head.safetensors")
    assert torch.equal(head["v_head.summary.weight"], own["v_head.weight"])
    assert torch.equal(head["v_head.summary.bias"], torch.zeros(1))
    assert call(tmp_path / "hf", "--to", "deepspeed-chat", "--out", tmp_path / "back").exit_code == 0
    assert equal(weights(tmp_path / "back"), own)


def test_a_head_that_a_reward_model_lacks_comes_from_the_base(models, tmp_path):
    folder, chat = models["llama3"], tmp_path / "chat"
    chat.mkdir()
    (chat / "config.json").write_text((folder / "config.json").read_text())
    own = {"rwtransformer." + name.removeprefix("model."): one for name, one in weights(folder).items()}
    del own["rwtransformer.lm_head.weight"]
    save_file({**own, "v_head.weight": torch.ones(1, 32)}, chat / "model.safetensors")
    assert refused(chat, "--out", tmp_path / "out") == {"SF-CONVERT-LAYOUT"}
    result = call(chat, "--out", tmp_path / "out", "--base", folder)
    assert "\nnote: lm_head.weight " in result.stdout
    assert equal(weights(tmp_path / "out"), weights(folder))


def test_a_folder_of_pickles_names_the_command_that_works(models, tmp_path):
    other = tmp_path / "it's"
    shutil.copytree(models["llama3"], other)
    torch.save(weights(other), other / "pytorch_model.bin")
    (other / "model.safetensors").unlink()
    with pytest.raises(InputError) as caught:
        load(other)
    command = str(caught.value).partition("run: surefoot ")[2]
    assert CliRunner().invoke(main, shlex.split(command)).exit_code == 0
    assert equal(weights(tmp_path / "it's-safetensors"), weights(models["llama3"]))


def test_nothing_is_left_of_a_refusal_and_nothing_replaced_unasked(models, tmp_path):
    out = tmp_path / "out"
    assert call(models["llama3"], "--to", "fused", "--dry-run").exit_code == 0
    assert call(models["llama3"], "--out", out).exit_code == 0
    assert refused(models["qwen2"], "--out", out) == {"SF-USE-OUTPUT"}
    assert call(models["qwen2"], "--out", out, "--overwrite").exit_code == 0
    record = json.loads((out / "convert.json").read_text())
    assert record["layouts"] == ["hf"]
    assert set(record["files_out"]) == {path.name for path in out.iterdir()} - {"convert.json"}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert refused(models["qwen2"], "--out", tmp_path / "mine", "--overwrite") == {"SF-USE-OUTPUT"}
    assert refused(out, "--out", out, "--overwrite") == {"SF-USE-OUTPUT"}
    for to in ("split", "peft"):
        assert refused(models["llama3"], "--to", to, "--out", tmp_path / "no") == {"SF-CONVERT-LAYOUT"}
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]


def test_a_layout_is_named_once_however_many_matrices_it_is_in(models, tmp_path):
    peft_adapter(models["llama3"], tmp_path / "own", target_modules=LINEAR["llama3"])
    assert call(tmp_path / "own", "--to", "fused", "--base", models["llama3"], "--out", tmp_path / "out").exit_code == 0
    saved = fitted(read_adapter(tmp_path / "out"), facts_of(models["llama3"]))
    assert saved.layouts == ("fused",)
    assert fitted(read_adapter(tmp_path / "own"), facts_of(models["llama3"])).layouts == ()


def test_weights_in_few_bits_are_exported_not_converted(models, tmp_path):
    shutil.copytree(models["llama3"], tmp_path / "base")
    in_gptq(tmp_path / "base", tmp_path / "plain")
    words = ["convert", str(tmp_path / "base"), "--out", str(tmp_path / "out")]
    said = CliRunner().invoke(main, words).output
    assert prints_fault(said, "SF-CONVERT-LAYOUT", tmp_path / "base", "GPTQ")
    assert f"surefoot export {tmp_path / 'base'}" in said
    words[1] = str(tmp_path / "plain")  # twin: what it stands for
    assert CliRunner().invoke(main, words).exit_code == 0
