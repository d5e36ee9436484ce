"""Bad tokenizers and models."""

import json
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from faults.data_cases import dry
from faults.place import Case, Place, Prepare, Words, refused
from surefoot.system.plain_files import MOST

NOT_FINITE = {"NaN": float("nan"), "infinity": float("inf")}
QUERY = "model.layers.0.self_attn.q_proj.weight"
PICKLED = ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt")
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


def cut_at(eighths: int) -> Callable[[bytes], bytes]:
    return lambda content: content[: len(content) * eighths // 8]


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


CASES = [
    *refused(
        {
            "SF-MODEL-KEYS": {
                "base": {
                    "a renamed tensor": weights(lambda own: own.update(more=own.pop(NORM))),
                    "an encoder": config(model_type="bert"),
                },
            },
        },
        faults=2,
    ),
    *refused(
        {
            "SF-MODEL-WEIGHTS": {
                "base/model-00001-of-00002.safetensors": {
                    "a missing shard": sharded({"a": "model-00001-of-00002.safetensors"})
                },
                "base": {
                    "no weights": without("model.safetensors"),
                    **{f"pickled weights, {name}": pickled(name) for name in PICKLED},
                },
                "base/more.safetensors": {"other weights that are none": file("more.safetensors", b"\xff" * 64)},
                "base/model.safetensors": {
                    "a byte too many": bytes_of(lambda all: all + b"\0"),
                    "nonsense for weights": bytes_of(lambda all: b"x" * len(all)),
                    "a header that is no JSON": bytes_of(lambda all: all[:8] + b"x" * (len(all) - 8)),
                    "a header nested without end": file(
                        "model.safetensors", struct.pack("<Q", 100_000) + b"[" * 100_000
                    ),
                    "a shape that is not that of the data": header(lambda own: own[NORM].update(shape=[7])),
                    "two tensors in one place": header(
                        lambda own: own[NORM].update(data_offsets=own["model.norm.weight"]["data_offsets"])
                    ),
                    "an unknown type": header(lambda own: own[NORM].update(dtype="F99")),
                    "negative places": header(lambda own: own[NORM].update(data_offsets=[-128, 0])),
                    **{f"cut at {part}/8": bytes_of(cut_at(part)) for part in (0, 1, 4, 7)},
                },
            },
            "SF-FILE-MISSING": {
                "run.yaml:2:8: model.path": {
                    "no folder": keys(model="./gone"),
                    "no config.json": without("config.json"),
                },
                "run.yaml:9:13: data.template": {
                    "a template file that is not there": keys(data={"template": "gone.jinja"})
                },
                "base/tokenizer.json": {"no tokenizer": without("tokenizer.json")},
            },
            "SF-ADAPTER-FIT": {
                "out": {"pickled adapter": pickled_adapter},
                "out/adapter_config.json": {
                    "an adapter of another kind": adapter(peft_type="IA3"),
                    "an adapter that altered its base": adapter(init_lora_weights="pissa"),
                },
                "out/adapter_model.safetensors": {"an adapter with another rank": adapter(r=9)},
            },
            "SF-MODEL-KEYS": {
                "base": {
                    "a missing tensor": weights(lambda own: own.pop(NORM)),
                    "a tied config over two matrices": config(tie_word_embeddings=True),
                    "more layers in the config": config(num_hidden_layers=3),
                },
                "base/model.safetensors": {
                    "a surplus tensor": weights(lambda own: own.update(more=torch.ones(2))),
                    "another width in the config": config(hidden_size=64, head_dim=16),
                    "an adapter for another base": other_base,
                },
            },
            "SF-MODEL-KIND": {
                "base/config.json": {
                    "heads that do not divide": config(num_attention_heads=7, head_dim=None),
                    "a word for a number": config(hidden_size="wide"),
                    "no layers": config(num_hidden_layers=0),
                    "a negative width": config(intermediate_size=-64),
                    "an unknown architecture": config(model_type="odd", auto_map={"AutoConfig": "odd.Odd"}),
                    "no architecture": config(model_type=None),
                    "a repository for attention": config(_attn_implementation="someone/kernels"),
                    "the same, inside": config(text_config={"attn_implementation": "someone/kernels"}),
                    "a repository for experts": config(experts_implementation="a/b"),
                },
            },
            "SF-FILE-UNREADABLE": {
                "base/config.json:1:16": {"config.json cut": file("config.json", '{"model_type": "lla')},
                "base/config.json": {
                    "config.json is a list": file("config.json", "[]"),
                    "config.json in Latin-1": file("config.json", b'{"a": "\xe9"}'),
                    "config.json with 5000 digits": file("config.json", '{"hidden_size": ' + "9" * 5000 + "}"),
                    "config.json nested without end": file("config.json", '{"a": ' + "[" * 100_000),
                },
                "own.jinja": {
                    "Jinja in Latin-1": lambda place: place.change(
                        data={"template": str(place.text("own.jinja", "é".encode("latin-1")))}
                    )
                },
                "base/tokenizer.json:1:11": {"tokenizer.json cut": file("tokenizer.json", '{"model": ')},
                "base/tokenizer.json": {"a tokenizer.json of holes": holes("tokenizer.json")},
                "base/tokenizer_config.json:1:2": {
                    "tokenizer_config.json in pieces": file("tokenizer_config.json", "{")
                },
                "base/chat_template.jinja": {
                    "a chat template that is no text": file("chat_template.jinja", b"\xff\xfe")
                },
            },
            "SF-ADAPTER-TARGETS": {
                "run.yaml:7:3: adapter.targets": {
                    "targets that are not there": keys(adapter={"targets": ["q_prj"]}),
                    "targets that are no linear layers": keys(adapter={"targets": ["norm"]}),
                },
                "run.yaml:7:3: adapter.modules_to_save": {
                    "a module that is not there": keys(adapter={"modules_to_save": ["no_such"]})
                },
            },
            "SF-CONFIG-CONFLICT": {
                "run.yaml:13:9: precision.base": {
                    "a frozen base and no adapter": keys(adapter=None, precision={"base": "bf16"})
                },
                "run.yaml:16:8: tokenizer.pad": {"a word for PAD": keys(tokenizer={"pad": "a"})},
            },
            "SF-TOKENIZER": {
                "run.yaml:2:8: model": {"more tokens than rows": tokenizer(more_tokens)},
                "run.yaml:16:8: tokenizer.pad": {"an unknown token for PAD": keys(tokenizer={"pad": "<nothing>"})},
                "base/tokenizer.json": {
                    "tokenizer.json without a vocabulary": file("tokenizer.json", "{}"),
                    "a part that breaks its library off": tokenizer(broken_off),
                    "a part that breaks it off later": tokenizer(in_nothing),
                },
                "base": {"ids that are words": tokenizer(lambda own: own["model"]["vocab"].update({"a": "x"}))},
                "tokenizer": {
                    "an end token that is nowhere": tokenizer(
                        lambda own: own.update(eos_token="<end>"), "tokenizer_config.json"
                    )
                },
            },
            "SF-DATA-TEMPLATE": {
                "run.yaml:9:13: data.template": {
                    "no chat template": no_template,
                    "an unknown template": keys(data={"template": "lama3"}),
                },
                "own.jinja:2": {
                    "broken Jinja": template("{% for m in messages %}\n{{ m.content"),
                    "Jinja that fails": template("\n{{ messages[0].no.such }}"),
                },
                "own.jinja": {"Jinja that prints nothing": template("nothing")},
            },
            "SF-DATA-ROW": {
                "train.jsonl:1": {"a template that drops the beginning": history_stripped},
            },
            "SF-MODEL-NUMBERS": {
                **{
                    f"base/model.safetensors: {name}": {
                        f"{word} in {name}": put(name, value) for word, value in NOT_FINITE.items()
                    }
                    for name in (QUERY, NORM, "lm_head.weight")
                },
            },
        }
    ),
    *refused(
        {
            "SF-HUB-OFFLINE": {
                "some-org/some-model": {"offline without a copy": offline, "nobody answers": unreachable},
            },
        },
        exit=3,
    ),
    Case("a FIFO beside the weights", dry(fifo_beside), exit=0, shows=("dry run",)),
    Case(
        "matrices of q, k and v in one",
        dry(weights(fused)),
        exit=0,
        shows=("(fused)",),
    ),
    Case(
        "names from under an adapter",
        dry(weights(from_under_an_adapter)),
        exit=0,
        shows=("(base-layer)",),
    ),
    Case(
        "added rows over a frozen embedding are saved",
        keys(tokenizer={"pad": "add"}, duration="1 step"),
        exit=0,
        writes=True,
    ),
]
