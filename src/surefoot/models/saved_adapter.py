"""Load adapter folders written by any tool onto their base model.

Only settings that describe a LoRA or DoRA adapter are read from `adapter_config.json`. An unknown setting that would
change the result raises an error instead of being ignored, and so do pickled weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from surefoot.families.files import read_json
from surefoot.families.model_facts import ModelFacts
from surefoot.models.adapters import ADAPTER
from surefoot.models.convert.recognize import Target
from surefoot.models.convert.recognize_adapter import PEFT_FRONT, RecognizedAdapter, fit_to_base, recognize_adapter
from surefoot.models.convert.safetensors_file import lazy_tensors, read_header
from surefoot.models.convert.tensors import Tensors
from surefoot.models.folder import ADAPTER_CONFIG, convert_command
from surefoot.models.peft import LoraConfig, PeftModel, TaskType, get_peft_model
from surefoot.models.precision import is_finite
from surefoot.models.quiet import quiet_libraries
from surefoot.models.save import ADAPTER_WEIGHTS, adapter_tensors, load_adapter_weights, without_duplicates
from surefoot.planning.plan import AdapterPlan
from surefoot.system.errors import Fault, InputError

_READ = frozenset(
    {
        "r",
        "lora_alpha",
        "use_dora",
        "use_rslora",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "bias",
        "lora_bias",
        "fan_in_fan_out",
        "ensure_weight_tying",
    }
)
# Settings about an adapter's origin or training, which do not affect the trained adapter.
_WITHOUT_EFFECT = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "loftq_config",
        "qalora_group_size",
        "runtime_config",
    }
)
# Suffix of an embedding's or head's tensor name, and its vocabulary axis.
_VOCABULARY = (
    (".weight", 0),
    (".base_layer.weight", 0),
    (".modules_to_save.weight", 0),
    (".lora_embedding_A", 1),
    (".lora_B.weight", 0),
)
_PLAIN_STARTS = (True, False, None, "gaussian")  # other initializations (pissa, olora …) change the base weights


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter folder, without its weights read.

    base, revision: base model as named in adapter_config.json.
    rows: embedding rows with which the adapter was trained, if it contains tensors of embedding or head; set by
        `fitted`.
    settings: the entries of adapter_config.json that describe the adapter.
    tensors: PEFT name -> lazily read tensor.
    layouts: layouts from which the tensors are converted; () for PEFT's own.
    """

    folder: Path
    base: str
    revision: str | None
    rows: int | None
    settings: dict[str, Any]
    tensors: Tensors
    layouts: tuple[str, ...] = ()


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> SavedAdapter:
    """Read an adapter folder. Raises InputError for unsupported kinds of adapters and for pickled weights."""
    path, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        pickled = (folder / ADAPTER_WEIGHTS).with_suffix(".bin").is_file()
        what = "has only pickled weights, which are never opened" if pickled else f"has no {ADAPTER_WEIGHTS}"
        again = "save the adapter as safetensors; for a run, surefoot train CONFIG --resume does"
        fix = convert_command(folder) if pickled else again
        no_weights = Fault(str(folder), what, fix, code="SF-ADAPTER-FIT")
        raise InputError([*_unknown_settings(read_json(path), str(path)), no_weights])
    found = recognize_adapter(lazy_tensors(read_header(weights)), read_json(path), str(path))
    if faults := _unknown_settings(found.config, str(path)):
        raise InputError(faults)
    settings = {key: value for key, value in found.config.items() if key in _READ}
    base, revision = found.config.get("base_model_name_or_path") or "", found.config.get("revision")
    return SavedAdapter(folder, base, revision, None, settings, found.tensors, found.layouts)


def fitted(saved: SavedAdapter, facts: ModelFacts) -> SavedAdapter:
    """Convert the adapter to the matrices of the base, by splitting or fusing. Raises InputError if that is not exact,
    and for an embedding with fewer rows than the base's."""
    plain = RecognizedAdapter(saved.layouts, (), saved.tensors, saved.settings)
    found = fit_to_base(plain, Target({}, facts), str(saved.folder / ADAPTER_CONFIG))
    rows = _vocabulary_rows(found.tensors, facts)
    if rows is not None and rows < facts.vocab:
        what = f"was trained with an embedding of {rows} rows, but the base has {facts.vocab}"
        where = str(saved.folder / ADAPTER_WEIGHTS)
        raise InputError(Fault(where, what, "it belongs to another model", code="SF-ADAPTER-FIT"))
    settings = dict(found.config)
    return dataclasses.replace(saved, rows=rows, settings=settings, tensors=found.tensors, layouts=found.layouts)


def open_adapter(model: PreTrainedModel, saved: SavedAdapter) -> PeftModel:
    """Load the adapter onto its base, which must already have `saved.rows` rows. Raises InputError if it does not
    fit."""
    with _faults_of(saved), quiet_libraries(), torch.random.fork_rng(devices=[]):
        adapted = get_peft_model(model, _config(saved))
    _load(adapted, saved, ADAPTER)
    return adapted.eval()


def add_saved(model: PeftModel, saved: SavedAdapter, name: str) -> None:
    """Add a saved adapter, with its own target modules, to a model with adapters. Raises InputError if it does not fit.
    PEFT changes requires_grad of the other adapters."""
    with _faults_of(saved), quiet_libraries(), torch.random.fork_rng(devices=[]):
        model.add_adapter(name, _config(saved))
    _load(model, saved, name)


def start_from(model: PeftModel, saved: SavedAdapter) -> None:
    """Give the model's new adapter the weights of a saved one, whose scale `check_shape` has compared. Raises
    InputError if names or shapes differ."""
    _load(model, saved, ADAPTER)


def check_shape(saved: SavedAdapter, plan: AdapterPlan, facts: ModelFacts) -> None:
    """Raises InputError unless the adapter has kind, rank, scale and modules of the planned one.

    facts: the base model.
    """
    own, where = _config(saved), str(saved.folder / ADAPTER_CONFIG)
    settings = {
        "use_dora": (own.use_dora, plan.kind.value == "dora"),
        "use_rslora": (own.use_rslora, plan.rslora),
        "r": (own.r, plan.rank),
        "lora_alpha": (own.lora_alpha, int(plan.alpha) if plan.alpha.is_integer() else plan.alpha),
    }
    fix = "leave adapter.kind, rank, alpha and rslora out, or give them the values of the saved adapter"
    faults = [
        Fault(where, f"has {name} {theirs}, but the run's adapter has {mine}", fix, code="SF-ADAPTER-FIT")
        for name, (theirs, mine) in settings.items()
        if theirs != mine
    ]
    for name, usual in (("rank_pattern", own.r), ("alpha_pattern", own.lora_alpha)):
        others = {module: value for module, value in (saved.settings.get(name) or {}).items() if value != usual}
        if others:
            module, value = next(iter(others.items()))
            what = f"{name} gives {module} {value} instead of {usual}, but a run has one rank and one alpha"
            fix = "merge it into its base (surefoot export --merge) and train a new adapter on that"
            faults.append(Fault(where, what, fix, code="SF-ADAPTER-FIT"))
    if not plan.parameters:  # PEFT's names of adapted parameters tell only their module
        faults += _other_modules(saved, plan, facts, shapes=not faults)
    if faults:
        raise InputError(faults)


def _other_modules(saved: SavedAdapter, plan: AdapterPlan, facts: ModelFacts, *, shapes: bool) -> Iterator[Fault]:
    """shapes: whether to compare the tensors' shapes, which another rank changes."""
    ends = (".lora_A.weight", ".lora_B.weight")
    there = {name.removeprefix(f"{PEFT_FRONT}.") for name in saved.tensors if name.endswith(ends)}
    planned = {f"{module}{end}" for module in plan.targets.value for end in ends}
    where = str(saved.folder / ADAPTER_WEIGHTS)
    if different := sorted(name.partition(".lora_")[0] for name in there ^ planned):
        what = f"{different[0]} has an adapter in only one of file and plan"
        yield Fault(
            where, what, "leave adapter.targets out, or give it the modules of the saved adapter", code="SF-ADAPTER-FIT"
        )
        return
    for module in facts.modules if shapes else ():
        if module.linear is None or not module.in_layer or module.name not in plan.targets.value:
            continue  # a head's rows may be more than the base's
        inputs, outputs = module.linear
        for end, shape in zip(ends, ([plan.rank, inputs], [outputs, plan.rank]), strict=True):
            found = list(saved.tensors[f"{PEFT_FRONT}.{module.name}{end}"].shape)
            if found != shape:
                what = f"{module.name}{end} is {found}, the model's is {shape}"
                yield Fault(where, what, "it belongs to another model", code="SF-ADAPTER-FIT")
                return


def _config(saved: SavedAdapter) -> LoraConfig:
    return LoraConfig(task_type=TaskType.CAUSAL_LM, **saved.settings)


@contextmanager
def _faults_of(saved: SavedAdapter) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        where, what = str(saved.folder / ADAPTER_CONFIG), f"does not fit this model: {error}"
        raise InputError(Fault(where, what, code="SF-ADAPTER-FIT")) from error


def _load(model: PeftModel, saved: SavedAdapter, name: str) -> None:
    own = adapter_tensors(model, save_embedding=False, name=name)
    brings = without_duplicates(saved.tensors).keys() - own.keys()
    load_adapter_weights(model, saved.folder, save_embedding=bool(brings), tensors=saved.tensors, name=name)
    for key, tensor in adapter_tensors(model, bool(brings), name).items():
        if not is_finite(tensor):
            where, what = str(saved.folder / ADAPTER_WEIGHTS), f"{key} has values that are NaN or infinite"
            raise InputError(Fault(where, what, "use another checkpoint", code="SF-MODEL-NUMBERS"))


def _unknown_settings(config: Mapping[str, Any], where: str) -> list[Fault]:
    if config.get("peft_type") != "LORA":
        what = f"is a {config.get('peft_type')} adapter"
        return [Fault(where, what, "only LoRA and DoRA adapters are read", code="SF-ADAPTER-FIT")]
    faults = []
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        what = f"was initialized with {config['init_lora_weights']}, which changes the base weights"
        faults.append(Fault(where, what, "convert it to a plain LoRA adapter with PEFT", code="SF-ADAPTER-FIT"))
    defaults = {field.name: getattr(LoraConfig(), field.name) for field in dataclasses.fields(LoraConfig)}
    unknown = sorted(config.keys() - _READ - _WITHOUT_EFFECT - {"init_lora_weights"})
    unknown = [key for key in unknown if config[key] and config[key] != defaults.get(key)]
    fix = "merge the adapter with PEFT first"
    return faults + [
        Fault(where, f"{key}: {config[key]!r} is not supported", fix, code="SF-ADAPTER-FIT") for key in unknown
    ]


def _vocabulary_rows(tensors: Tensors, facts: ModelFacts) -> int | None:
    """Return the rows that the adapter's output head has, which are the embedding's but for its spare ones."""
    spare = {facts.embedding: facts.spare_rows, facts.head: 0}
    names = [(f"{PEFT_FRONT}.{module}{end}", axis, own) for module, own in spare.items() for end, axis in _VOCABULARY]
    return next((tensors[name].shape[axis] - own for name, axis, own in names if name in tensors), None)
