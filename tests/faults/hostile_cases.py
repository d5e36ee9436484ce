"""Files from strangers that would run code, read or write elsewhere, or never end, beside those of the other tables.

Code that ran would leave `marker` in the folder of the test; a name that escaped would leave `escaped`.
"""

import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch

from faults.model_cases import Payload, config, sharded, template
from faults.place import Case, Place, Prepare, Words, refused
from faults.run_cases import raw, resumed


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
    *refused(
        {
            "SF-CONFIG-KEY": {
                "run.yaml:15:1": {"an alias, of which a few make millions of values": raw(ALIASES)},
            },
        },
        faults=40 + 40 + 2 * 39,
    ),
    *refused(
        {
            "SF-MODEL-WEIGHTS": {
                "base": {"distributed metadata": distributed},
                "their/pytorch_model.bin": {
                    "for convert": converted(lambda path, payload: path.write_bytes(pickle.dumps(payload))),
                    "zip for convert": converted(lambda path, payload: torch.save({"w": payload}, path)),
                    "tar for convert": converted(tarred),
                },
                "base/model.safetensors.index.json": {
                    "a shard above": sharded({"a": "../../x.safetensors"}),
                    "an absolute shard": sharded({"a": "/etc/passwd"}),
                },
                "base/part.safetensors": {"a shard that is a link": linked_shard},
            },
            "SF-TRANSLATE-COMMAND": {
                "theirs.yaml": {
                    "a tag": translated(
                        "theirs.yaml", "stage: sft\nx: !!python/object/apply:os.system ['touch {folder}/marker']\n"
                    )
                },
            },
            "SF-TRANSLATE-SCRIPT": {
                "theirs.py": {"a script": translated("theirs.py", "import os\nos.system('touch {folder}/marker')\n")},
            },
            "SF-DATA-TEMPLATE": {
                "own.jinja:1": {**{name: template(source + CHATML) for name, source in TEMPLATES.items()}},
            },
        }
    ),
    *refused(
        {
            "SF-CHECKPOINT-DAMAGED": {
                "out/checkpoint-6/MANIFEST.json": {"a manifest that points outside": resumed(manifest_outside)},
            },
        },
        exit=4,
        faults=4,
    ),
    Case("arguments beside the weights", planned(arguments_beside), exit=0, shows=("dry run",)),
    Case("model code", planned(model_code), exit=0, shows=("dry run",)),
    Case("other weights", planned(config(transformers_weights="../../x.bin")), exit=0, shows=("dry run",)),
    Case("code by auto_map", planned(tokenizer_code), exit=0, shows=("dry run",)),
    Case("code by its class", planned(tokenizer_class), exit=0, shows=("dry run",)),
    Case("custom code", planned(generation_code), exit=0, shows=("dry run",)),
    Case("a name for a shell", shell_words, exit=0, shows=("dry run",)),
]
