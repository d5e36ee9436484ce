"""Files from strangers that would run code, read or write elsewhere, or never end: 30 of them, each with its command.

Code that ran would leave `marker` in the folder of the test; a name that escaped would leave `escaped`.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch

from faults.case import Case, Words
from faults.data_cases import archive, data, described, gzip_bomb, script
from faults.model_cases import Payload, config, pickled, pickled_adapter, sharded, template
from faults.place import Place
from faults.run_cases import raw, resumed

Prepare = Callable[[Place], Words | None]


def code_beside(place: Place, name: str) -> None:
    """A module in the folder of the model that leaves a marker when it is imported."""
    (place.own_base() / name).write_text(f"open({str(place.folder / 'marker')!r}, 'w')\n")


def planned(prepare: Prepare) -> Prepare:
    def words(place: Place) -> Words:
        prepare(place)
        return ["train", place.config(), "--dry-run"]

    return words


def model_code(place: Place) -> None:
    code_beside(place, "modeling_own.py")
    config(auto_map={"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"})(place)


def tokenizer_code(place: Place) -> None:
    code_beside(place, "tokenization_own.py")
    path = place.own_base() / "tokenizer_config.json"
    place.json(path, lambda own: own.update(auto_map={"AutoTokenizer": ["tokenization_own.Own", None]}))


def tokenizer_class(place: Place) -> None:
    code_beside(place, "tokenization_own.py")
    path = place.own_base() / "tokenizer_config.json"
    place.json(path, lambda own: own.update(tokenizer_class="tokenization_own.Own"))


def generation_code(place: Place) -> None:
    (place.own_base() / "custom_generate").mkdir()
    code_beside(place, "custom_generate/generate.py")


def arguments_beside(place: Place) -> None:
    (place.own_base() / "training_args.bin").write_bytes(pickle.dumps(Payload(place.folder / "marker")))


def distributed(place: Place) -> None:
    base = place.own_base()
    (base / "shard-00000-model-00000-of-00001.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    (base / ".metadata").write_bytes(pickle.dumps(Payload(place.folder / "marker")))


def converted(write: Callable[[Path, Payload], object]) -> Prepare:
    """Pickled weights for `convert`, which alone opens any."""

    def prepare(place: Place) -> Words:
        path = place.text("their/pytorch_model.bin", "")
        (path.parent / "config.json").write_bytes((place.base / "config.json").read_bytes())
        write(path, Payload(place.folder / "marker"))
        return ["convert", str(path.parent), "--out", str(place.folder / "new")]

    return prepare


def tarred(path: Path, payload: Payload) -> None:
    with tarfile.open(path, "w") as packed:
        for name in ("../escaped", "/tmp/escaped", "storages"):
            entry = tarfile.TarInfo(name)
            entry.size = 1
            packed.addfile(entry, io.BytesIO(b"x"))


def manifest_outside(place: Place) -> None:
    for path in (place.folder / "out").glob("checkpoint-*/MANIFEST.json"):
        own = json.loads(path.read_text())
        own["files"] = {f"../../{name}": value for name, value in own["files"].items()}
        path.write_text(json.dumps(own))


def linked_shard(place: Place) -> None:
    sharded({"a": "part.safetensors"})(place)
    (place.own_base() / "part.safetensors").symlink_to("/etc/passwd")


def translated(name: str, content: str) -> Prepare:
    def prepare(place: Place) -> Words:
        return ["translate", str(place.text(name, content.replace("{folder}", str(place.folder))))]

    return prepare


def shell_words(place: Place) -> Words:
    """A name that a shell would run."""
    place.change(output=f"{place.folder}/out; touch {place.folder}/marker", duration="1 step")
    return ["train", place.config(), "--dry-run"]


CHATML = "{% for m in messages %}<|start_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
SYSTEM = "lipsum.__globals__['os'].system('touch marker')"
ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))  # 2^40 values
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for n in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
TEMPLATES = {
    "runs a command": "{{ " + SYSTEM + " }}",
    "reaches classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reaches globals": "{{ messages.append.__globals__ }}",
    "reaches by another name": "{{ (messages | attr('__class__')).mro() }}",
    "reads a file": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}{{ os }}",
    "never ends": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "looks up what has no end": TUPLES + "{{ {ns.x: 1} }}",
    "searches without end": "{% set y = 'a' * 4999999 ~ 'b' ~ 'a' * 4999999 %}{{ ('a' * 19999999).rpartition(y) }}",
    "computes without end": "{{ (('f' * 9000000) | int(base=16)) // (('e' * 4000000) | int(base=16)) }}",
    "grows": "{% set ns = namespace(x='a') %}{% for n in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
}
CASES = [
    *(
        Case("pickle", f"weights, {name}", pickled(name), 2, (name, "can run code"))
        for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth")
    ),
    Case("pickle", "adapter", pickled_adapter, 2, ("pickled",)),
    Case("pickle", "arguments beside the weights", planned(arguments_beside), 0, ("dry run",)),
    Case("pickle", "distributed metadata", distributed, 2, ("pickled",)),
    Case(
        "pickle",
        "for convert",
        converted(lambda path, payload: path.write_bytes(pickle.dumps(payload))),
        2,
        ("asks for",),
    ),
    Case(
        "pickle", "zip for convert", converted(lambda path, payload: torch.save({"w": payload}, path)), 2, ("asks for",)
    ),
    Case("archive", "tar for convert", converted(tarred), 2, ("tar",)),
    Case("archive", "zip as data", data(archive(), "train.zip"), 2, ("train.zip",)),
    Case("archive", "gzip bomb", gzip_bomb, 2, ("unpacks to more",)),
    Case("config", "model code", planned(model_code), 0, ("dry run",)),
    Case(
        "config",
        "code of an unknown family",
        config(model_type="own", auto_map={"AutoConfig": "a--b.C"}),
        2,
        ("never run",),
    ),
    Case("config", "attention from a repository", config(_attn_implementation="a/b"), 2, ("names code",)),
    Case("config", "other weights", planned(config(transformers_weights="../../x.bin")), 0, ("dry run",)),
    Case("tokenizer", "code by auto_map", planned(tokenizer_code), 0, ("dry run",)),
    Case("tokenizer", "code by its class", planned(tokenizer_class), 0, ("dry run",)),
    Case("generation", "custom code", planned(generation_code), 0, ("dry run",)),
    *(Case("template", name, template(source + CHATML), 2, ("own.jinja",)) for name, source in TEMPLATES.items()),
    Case("names", "a shard above", sharded({"a": "../../x.safetensors"}), 2, ("outside its folder",)),
    Case("names", "an absolute shard", sharded({"a": "/etc/passwd"}), 2, ("outside its folder",)),
    Case("names", "a shard that is a link", linked_shard, 2, ("part.safetensors",)),
    Case("names", "a manifest that points outside", resumed(manifest_outside), 4, ("outside its folder",), faults=4),
    Case("names", "data above", described({"file_name": "../secret.json"}), 2, ("leaves the folder",)),
    Case("names", "data behind a link", described({"file_name": "inside.json"}, link=True), 2, ("link out",)),
    Case("names", "a name for a shell", shell_words, 0, ("dry run",)),
    Case("script", "of a data set", script, 2, ("sets",)),
    Case("yaml", "a tag", raw("seed: !!python/object/apply:os.system ['touch marker']\n"), 2, ("tag",)),
    Case(
        "yaml",
        "an alias, of which a few make millions of values",
        raw(ALIASES),
        2,
        ("alias *a38", "anchor &a39"),
        faults=40 + 40 + 2 * 39,
    ),
    Case(
        "dialect",
        "a tag",
        translated("theirs.yaml", "stage: sft\nx: !!python/object/apply:os.system ['touch {folder}/marker']\n"),
        2,
        ("theirs.yaml",),
    ),
    Case(
        "dialect",
        "a script",
        translated("theirs.py", "import os\nos.system('touch {folder}/marker')\n"),
        2,
        ("theirs.py",),
    ),
]
