"""Bad tokenizers and models: faults T4 to T13 and M1 to M18 of the catalogue."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from faults.case import Case, Words
from faults.data_cases import dry
from faults.place import Place
from surefoot.system.plain_files import MOST

Prepare = Callable[[Place], Words | None]
NOT_FINITE = {"NaN": float("nan"), "infinity": float("inf")}
QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


class Payload:
    """Unpickling this writes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "ran")


def config(**fields: Any) -> Prepare:
    """Fields of the model's config.json."""
    return lambda place: place.json(place.own_base() / "config.json", lambda own: own.update(fields))


def file(name: str, content: str | bytes) -> Prepare:
    """A file of the model with other content."""

    def prepare(place: Place) -> None:
        path = place.own_base() / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


def without(*names: str) -> Prepare:
    def prepare(place: Place) -> None:
        for name in names:
            (place.own_base() / name).unlink()

    return prepare


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Prepare:
    return lambda place: place.weights(change)


def fused(own: dict[str, torch.Tensor]) -> None:
    for layer in (0, 1):
        path = f"model.layers.{layer}.self_attn"
        own[f"{path}.qkv_proj.weight"] = torch.cat([own.pop(f"{path}.{part}_proj.weight") for part in "qkv"])


def from_under_an_adapter(own: dict[str, torch.Tensor]) -> None:
    own[QUERY.replace(".weight", ".base_layer.weight")] = own.pop(QUERY)


def put(name: str, value: float) -> Prepare:
    return weights(lambda own: own[name].view(-1)[3:4].fill_(value))


def bytes_of(change: Callable[[bytes], bytes]) -> Prepare:
    def prepare(place: Place) -> None:
        path = place.own_base() / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return prepare


def header(change: Callable[[dict[str, Any]], object]) -> Prepare:
    """The header of the weights, changed; the data behind it stay."""

    def spoil(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        own = json.loads(content[8 : 8 + length])
        change(own)
        text = json.dumps(own).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return bytes_of(spoil)


def sharded(weight_map: Mapping[str, str] | str, *files: str) -> Prepare:
    """An index in place of the one file. files: copies of the weights."""

    def prepare(place: Place) -> None:
        base = place.own_base()
        content = (base / "model.safetensors").read_bytes()
        (base / "model.safetensors").unlink()
        for name in files:
            (base / name).write_bytes(content)
        (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return prepare


def pickled(name: str) -> Prepare:
    def prepare(place: Place) -> None:
        (place.own_base() / "model.safetensors").unlink()
        (place.own_base() / name).write_bytes(pickle.dumps(Payload(place.folder / "marker")))

    return prepare


def keys(**changes: Any) -> Prepare:
    return lambda place: place.change(**changes)


def template(source: str) -> Prepare:
    def prepare(place: Place) -> None:
        place.change(data={"template": str(place.text("own.jinja", source))})

    return prepare


def fifo_beside(place: Place) -> None:
    os.mkfifo(place.own_base() / "more.safetensors")


def holes(name: str) -> Prepare:
    """A file larger than any of its kind, which takes no room on the disk."""

    def prepare(place: Place) -> None:
        os.truncate(place.own_base() / name, MOST + 1)

    return prepare


def broken_off(own: dict[str, Any]) -> None:
    own["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def in_nothing(own: dict[str, Any]) -> None:
    """Texts in pieces of no letter."""
    own["pre_tokenizer"] = {"type": "FixedLength", "length": 0}


def tokenizer(change: Callable[[dict[str, Any]], object], name: str = "tokenizer.json") -> Prepare:
    return lambda place: place.json(place.own_base() / name, change)


def more_tokens(own: dict[str, Any]) -> None:
    highest = max(token["id"] for token in own["added_tokens"])
    plain = {key: value for key, value in own["added_tokens"][0].items() if key not in ("id", "content", "special")}
    own["added_tokens"] += [
        {**plain, "id": highest + more, "content": f"word{more}", "special": False} for more in (1, 2)
    ]


def no_template(place: Place) -> None:
    (place.own_base() / "chat_template.jinja").unlink()
    place.change(data={"template": "tokenizer"})


def history_stripped(place: Place) -> None:
    turn = "<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>"
    template("{% for m in messages[-2:] %}" + turn + "{% endfor %}")(place)
    turns = [{"role": role, "content": f"{role} {number}"} for number in range(3) for role in ("user", "assistant")]
    place.change(data={"train": str(place.lines("train.jsonl", [{"messages": turns}]))})


def other_base(place: Place) -> Words:
    """The run's adapter over a model that is wider."""
    place.weights(lambda own: own.update({name: torch.cat([one, one]) for name, one in own.items() if name == QUERY}))
    return ["generate", str(place.folder / "base"), "--adapter", str(place.own_run()), "--prompt", "a"]


def pickled_adapter(place: Place) -> Words:
    run = place.own_run()
    (run / "adapter_model.safetensors").unlink()
    (run / "adapter_model.bin").write_bytes(pickle.dumps(Payload(place.folder / "marker")))
    return ["generate", str(place.base), "--adapter", str(run), "--prompt", "a"]


def adapter(**fields: Any) -> Prepare:
    def prepare(place: Place) -> Words:
        run = place.own_run()
        place.json(run / "adapter_config.json", lambda own: own.update(fields))
        return ["generate", str(place.base), "--adapter", str(run), "--prompt", "a"]

    return prepare


def offline(place: Place) -> None:
    from helpers.hub_stub import go_offline

    go_offline(place.patch)
    place.patch.setenv("HF_HUB_CACHE", str(place.folder / "hub"))
    place.change(model="some-org/some-model")


def unreachable(place: Place) -> None:
    from helpers.hub_stub import point_at

    point_at(place.patch, "http://127.0.0.1:9")
    place.change(model="some-org/some-model")


MODELS = [
    Case(
        "M1",
        "a missing shard",
        sharded({"a": "model-00001-of-00002.safetensors"}),
        2,
        ("model-00001-of-00002.safetensors", "missing", "download"),
    ),
    Case("M1", "no weights", without("model.safetensors"), 2, ("base", "no weights", "model.safetensors")),
    Case("M1", "no folder", keys(model="./gone"), 2, ("run.yaml:", "model.path", "does not exist")),
    Case("M1", "no config.json", without("config.json"), 2, ("model.path", "no config.json")),
    *(
        Case(
            "M2",
            f"weights cut at {eighth}/8",
            bytes_of(lambda all, eighth=eighth: all[: len(all) * eighth // 8]),
            2,
            ("model.safetensors", "damaged", "expected", "download"),
        )
        for eighth in (0, 1, 4, 7)
    ),
    Case("M2", "other weights that are none", file("more.safetensors", b"\xff" * 64), 2, ("more.safetensors",)),
    Case("M2", "a FIFO beside the weights", dry(fifo_beside), 0, ("dry run",)),
    Case("M2", "a byte too many", bytes_of(lambda all: all + b"\0"), 2, ("model.safetensors", "expected")),
    Case("M2", "nonsense for weights", bytes_of(lambda all: b"x" * len(all)), 2, ("model.safetensors", "damaged")),
    Case(
        "M2",
        "a header that is no JSON",
        bytes_of(lambda all: all[:8] + b"x" * (len(all) - 8)),
        2,
        ("model.safetensors", "not a safetensors file"),
    ),
    Case(
        "M2",
        "a header nested without end",
        file("model.safetensors", struct.pack("<Q", 100_000) + b"[" * 100_000),
        2,
        ("model.safetensors", "not a safetensors file"),
    ),
    Case(
        "M2",
        "a shape that is not that of the data",
        header(lambda own: own[NORM].update(shape=[7])),
        2,
        ("model.safetensors",),
    ),
    Case(
        "M2",
        "two tensors in one place",
        header(lambda own: own[NORM].update(data_offsets=own["model.norm.weight"]["data_offsets"])),
        2,
        ("model.safetensors",),
    ),
    Case("M2", "an unknown type", header(lambda own: own[NORM].update(dtype="F99")), 2, ("model.safetensors",)),
    Case(
        "M2", "negative places", header(lambda own: own[NORM].update(data_offsets=[-128, 0])), 2, ("model.safetensors",)
    ),
    *(
        Case("M4", f"pickled weights, {name}", pickled(name), 2, (name, "can run code", "surefoot convert"))
        for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt")
    ),
    Case("M4", "pickled adapter", pickled_adapter, 2, ("out", "pickled", "surefoot convert")),
    Case(
        "M6",
        "matrices of q, k and v in one",
        dry(weights(fused)),
        0,
        ("is in another layout (fused)", "read through rules"),
    ),
    Case(
        "M7",
        "names from under an adapter",
        dry(weights(from_under_an_adapter)),
        0,
        ("is in another layout (base-layer)", "read through rules"),
    ),
    Case("M8", "a missing tensor", weights(lambda own: own.pop(NORM)), 2, (NORM,)),
    Case("M8", "a surplus tensor", weights(lambda own: own.update(more=torch.ones(2))), 2, ("more",)),
    Case("M8", "a renamed tensor", weights(lambda own: own.update(more=own.pop(NORM))), 2, (NORM,), faults=2),
    Case(
        "M9",
        "a tied config over two matrices",
        config(tie_word_embeddings=True),
        2,
        ("base", "output head", "tie_word_embeddings"),
    ),
    Case("M10", "another width in the config", config(hidden_size=64, head_dim=16), 2, ("base",)),
    Case("M10", "more layers in the config", config(num_hidden_layers=3), 2, ("model.layers.2",)),
    Case("M10", "heads that do not divide", config(num_attention_heads=7, head_dim=None), 2, ("config.json",)),
    Case("M10", "a word for a number", config(hidden_size="wide"), 2, ("config.json", "hidden_size")),
    Case("M10", "no layers", config(num_hidden_layers=0), 2, ("config.json",)),
    Case("M10", "a negative width", config(intermediate_size=-64), 2, ("config.json",)),
    Case("M10", "config.json cut", file("config.json", '{"model_type": "lla'), 2, ("config.json:1:", "not JSON")),
    Case("M10", "config.json is a list", file("config.json", "[]"), 2, ("config.json", "not an object")),
    Case("M10", "config.json in Latin-1", file("config.json", b'{"a": "\xe9"}'), 2, ("config.json", "read")),
    Case(
        "M10",
        "config.json with 5000 digits",
        file("config.json", '{"hidden_size": ' + "9" * 5000 + "}"),
        2,
        ("config.json",),
    ),
    Case("M10", "config.json nested without end", file("config.json", '{"a": ' + "[" * 100_000), 2, ("config.json",)),
    *(
        Case("M11", f"{word} in {where}", put(where, value), 2, (where, "NaN"))
        for word, value in NOT_FINITE.items()
        for where in (QUERY, NORM, "lm_head.weight")
    ),
    Case("M13", "offline without a copy", offline, 3, ("some-org/some-model", "HF_HUB_OFFLINE")),
    Case("M13", "nobody answers", unreachable, 3, ("some-org/some-model",)),
    Case("M14", "an adapter for another base", other_base, 2, ("base",)),
    Case("M14", "an adapter of another kind", adapter(peft_type="IA3"), 2, ("adapter_config.json", "IA3", "LoRA")),
    Case("M14", "an adapter with another rank", adapter(r=9), 2, ("out",)),
    Case("M14", "an adapter that altered its base", adapter(init_lora_weights="pissa"), 2, ("pissa", "convert it")),
    Case(
        "M15",
        "an unknown architecture",
        config(model_type="odd", auto_map={"AutoConfig": "odd.Odd"}),
        2,
        ("config.json", "odd", "never run"),
    ),
    Case("M15", "no architecture", config(model_type=None), 2, ("config.json", "model_type")),
    Case("M15", "an encoder", config(model_type="bert"), 2, ("base", "missing"), faults=2),
    Case(
        "M16",
        "a repository for attention",
        config(_attn_implementation="someone/kernels"),
        2,
        ("config.json", "_attn_implementation", "names code", "delete"),
    ),
    Case(
        "M16",
        "the same, inside",
        config(text_config={"attn_implementation": "someone/kernels"}),
        2,
        ("config.json", "names code", "delete"),
    ),
    Case("M16", "a repository for experts", config(experts_implementation="a/b"), 2, ("config.json", "names code")),
    Case("M17", "targets that are not there", keys(adapter={"targets": ["q_prj"]}), 2, ("adapter.targets", "q_proj")),
    Case("M17", "targets that are no linear layers", keys(adapter={"targets": ["norm"]}), 2, ("adapter.targets",)),
    Case(
        "M17",
        "a module that is not there",
        keys(adapter={"modules_to_save": ["no_such"]}),
        2,
        ("adapter.modules_to_save", "lm_head"),
    ),
    Case("M18", "a frozen base and no adapter", keys(adapter=None, precision={"base": "bf16"}), 2, ("precision.base",)),
]
TOKENIZERS = [
    Case("T4", "more tokens than rows", tokenizer(more_tokens), 2, ("tokenizer", "row")),
    Case(
        "T6",
        "added rows over a frozen embedding are saved",
        keys(tokenizer={"pad": "add"}, duration="1 step"),
        0,
        (),
        writes=True,
    ),
    Case("T7", "no chat template", no_template, 2, ("data.template", "alpaca")),
    Case("T7", "an unknown template", keys(data={"template": "lama3"}), 2, ("data.template", "llama3")),
    Case("T7", "a template file that is not there", keys(data={"template": "gone.jinja"}), 2, ("gone.jinja",)),
    Case("T8", "broken Jinja", template("{% for m in messages %}\n{{ m.content"), 2, ("own.jinja:2",)),
    Case("T8", "Jinja that fails", template("\n{{ messages[0].no.such }}"), 2, ("own.jinja:2",)),
    Case("T8", "Jinja that prints nothing", template("nothing"), 2, ("own.jinja", "print every turn")),
    Case(
        "T8",
        "Jinja in Latin-1",
        lambda place: place.change(data={"template": str(place.text("own.jinja", "é".encode("latin-1")))}),
        2,
        ("own.jinja",),
    ),
    Case("T11", "a template that drops the beginning", history_stripped, 2, ("template", "every turn")),
    Case("T13", "a word for PAD", keys(tokenizer={"pad": "a"}), 2, ("tokenizer.pad",)),
    Case("T13", "an unknown token for PAD", keys(tokenizer={"pad": "<nothing>"}), 2, ("tokenizer.pad",)),
    Case("T13", "no tokenizer", without("tokenizer.json"), 2, ("tokenizer.json", "save_pretrained")),
    Case("T13", "tokenizer.json cut", file("tokenizer.json", '{"model": '), 2, ("tokenizer.json",)),
    Case("T13", "tokenizer.json without a vocabulary", file("tokenizer.json", "{}"), 2, ("tokenizer.json", "vocab")),
    Case("T13", "ids that are words", tokenizer(lambda own: own["model"]["vocab"].update({"a": "x"})), 2, ("base",)),
    Case("T13", "a tokenizer.json of holes", holes("tokenizer.json"), 2, ("tokenizer.json", "is larger than 512 MiB")),
    Case("T13", "a part that breaks its library off", tokenizer(broken_off), 2, ("tokenizer.json", "break off")),
    Case("T13", "a part that breaks it off later", tokenizer(in_nothing), 2, ("tokenizer.json", "break off")),
    Case("T13", "tokenizer_config.json in pieces", file("tokenizer_config.json", "{"), 2, ("tokenizer_config.json",)),
    Case("T13", "a chat template that is no text", file("chat_template.jinja", b"\xff\xfe"), 2, ("base",)),
    Case(
        "T13",
        "an end token that is nowhere",
        tokenizer(lambda own: own.update(eos_token="<end>"), "tokenizer_config.json"),
        2,
        ("eos",),
    ),
]
CASES = [*MODELS, *TOKENIZERS]
