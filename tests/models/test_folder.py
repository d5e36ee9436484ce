"""A model folder is judged by its config and headers alone, before torch opens anything."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from helpers.faults import gives, raises_fault
from helpers.stored_forms import in_gptq
from surefoot.families.files import read_json
from surefoot.models import folder as folder_module
from surefoot.models.folder import read_config, stored_tensors, unpacked_caution
from surefoot.system.errors import InputError


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    return shutil.copytree(tiny_model(), tmp_path / "model")


def set_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def shard(folder: Path) -> list[str]:
    """Split the weights into two files with an index, as large models come."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return names


def test_headers_name_every_tensor_with_file_dtype_and_shape(model):
    single = stored_tensors(model)
    assert single["lm_head.weight"].shape == (329, 32)
    assert single["lm_head.weight"].dtype == "F32"
    shard(model)
    assert {name: entry.shape for name, entry in stored_tensors(model).items()} == {
        name: entry.shape for name, entry in single.items()
    }


def test_a_damaged_file_is_named_with_its_size(model):
    path = model / "model.safetensors"
    content = path.read_bytes()
    for eighths in range(8):  # cut off
        path.write_bytes(content[: len(content) * eighths // 8])
        with raises_fault("SF-MODEL-WEIGHTS", path, f"{path.stat().st_size:,}") as error:
            stored_tensors(model)
        assert error.value.exit_code == 2
    for damaged in (content + b"\0", (4).to_bytes(8, "little") + b"[[[["):  # a byte too many, and nonsense
        path.write_bytes(damaged)
        with raises_fault("SF-MODEL-WEIGHTS", path):
            stored_tensors(model)


def test_every_missing_shard_is_named(model):
    names = shard(model)
    for name in names:
        (model / name).unlink()
    with pytest.raises(InputError) as error:
        stored_tensors(model)
    assert [fault.where for fault in error.value.faults] == [str(model / name) for name in names]


def test_an_index_cannot_point_outside_its_folder(model):
    shard(model)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with raises_fault("SF-MODEL-WEIGHTS", f"{model}/model.safetensors.index.json", "../other.safetensors"):
        stored_tensors(model)


class Payload:
    """Unpickling this writes a marker file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "ran")


def test_pickled_weights_are_refused_and_never_opened(model, tmp_path):
    marker = tmp_path / "marker"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    with raises_fault("SF-MODEL-WEIGHTS", model, "pytorch_model.bin"):
        stored_tensors(model)
    assert not marker.exists()
    pickle.loads((model / "pytorch_model.bin").read_bytes())  # twin: the payload is live
    assert marker.exists()


def test_a_distributed_checkpoint_beside_the_weights_is_refused(model):
    """transformers would prefer it, and its metadata is a pickle."""
    shutil.copy(model / "model.safetensors", model / "shard-00000-model-00000-of-00001.safetensors")
    with raises_fault("SF-MODEL-WEIGHTS", model):
        stored_tensors(model)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
def test_a_config_that_names_a_kernel_repository_is_refused(model, key, monkeypatch):
    set_config(model, **{key: "someone/kernels"})
    one = "SF-MODEL-KIND", model / "config.json", key
    with raises_fault(*one):
        read_config(model)
    set_config(model, text_config={key: {"": "someone/kernels@main:f"}})
    with raises_fault(*one, also=[one]):
        read_config(model)
    set_config(model, **{key: "sdpa", "text_config": {}})
    assert key not in read_config(model)  # harmless, and still not passed on
    set_config(model, **{key: "someone/kernels"})
    monkeypatch.setattr(folder_module, "_CODE_PREFIXES", ())  # twin: without the rule it gets through
    assert key in read_config(model)


def test_remote_code_and_file_redirections_are_dropped(model):
    fields = {"auto_map": {"AutoConfig": "x--y.Z"}, "transformers_weights": "adapter_model.bin", "fusion_config": {}}
    set_config(model, **fields)
    assert not fields.keys() & read_config(model).keys()


CARD = "---\nlicense: mit\n{}\ntags:\n- x\n---\n# A model\nbase_model: elsewhere/other\n"


@pytest.mark.parametrize(
    ("stored", "values"),
    [
        ({"quant_method": "gptq", "bits": 3}, ["GPTQ", 3]),
        ({"quant_method": "awq", "bits": 8}, ["AWQ", 8]),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ["bitsandbytes"]),
        ({"quant_method": "compressed-tensors"}, ["compressed-tensors"]),
        ({}, []),
        ("int4", []),
    ],
)
def test_weights_that_are_stored_quantized_are_no_fault_of_the_config(model, stored, values):
    read_config(model)
    set_config(model, quantization_config=stored)
    with raises_fault("SF-MODEL-QUANTISED", f"{model}/config.json", *values) as caught:
        read_config(model)
    assert caught.value.exit_code == 3
    assert "precision.base: nf4 or int8" in caught.value.faults[0].fix


def test_plain_weights_whose_config_says_that_they_are_packed_are_told_apart(model, tmp_path):
    """As of a model that was dequantized and saved with its old config."""
    assert unpacked_caution(model) is None
    in_gptq(model, tmp_path / "plain")
    assert unpacked_caution(model) is None
    set_config(tmp_path / "plain", quantization_config=read_json(model / "config.json")["quantization_config"])
    assert gives(unpacked_caution(tmp_path / "plain") or "", "GPTQ")


@pytest.mark.parametrize(
    ("said", "original"),
    [
        ("base_model: org/model-7B", "org/model-7B"),
        ("base_model:\n- org/model-7B", "org/model-7B"),
        ("base_model:\n- org/one\n- org/two", None),
        ("language: en", None),
    ],
)
def test_the_model_that_it_was_made_from_is_named_where_the_card_names_it(model, said, original):
    set_config(model, quantization_config={"quant_method": "gptq", "bits": 3})
    (model / "README.md").write_text(CARD.format(said))
    with raises_fault("SF-MODEL-QUANTISED", f"{model}/config.json") as caught:
        read_config(model)
    fix = caught.value.faults[0].fix
    assert f"use {original or 'the original model'};" in fix
    assert "elsewhere" not in fix


def test_an_adapter_folder_is_told_apart_from_a_model(model):
    (model / "adapter_config.json").write_text("{}")
    with raises_fault("SF-MODEL-KIND", model):
        read_config(model)


@pytest.mark.parametrize(("text", "place"), [('{"a": 1', ":1:8"), ("[1]", ""), ("\x00", ":1:1")])
def test_a_broken_config_is_one_line(model, text, place):
    (model / "config.json").write_text(text)
    with raises_fault("SF-FILE-UNREADABLE", f"{model}/config.json{place}"):
        read_config(model)
