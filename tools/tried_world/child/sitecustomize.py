"""A small world around a training script: data sets are `made_rows`, sizes and times are small, and what needs a GPU is
replaced. Every replacement is written into the file $TRIED_WORLD_SAID. Models come from the hub at $HF_ENDPOINT."""

from __future__ import annotations

import builtins
import functools
import getpass
import importlib.abc
import importlib.machinery
import json
import os
import re
import resource
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import made_rows

STEPS, BATCH, LENGTH, ANSWER = 2, 2, 256, 12
MEMORY = 6 << 30  # bytes: a script that builds a model by its own sizes ends
_TRACKERS = (
    "wandb",
    "swanlab",
    "comet_ml",
    "google.colab",
    "kaggle_secrets",
    "trackio",
    "codecarbon",
    "mlflow",
    "dotenv",
    "openai",
    "gradio",
    "anthropic",
    "langfuse",
    "modelscope",
    "flash_attn",
)
_ON_GPU = ("quantization_config", "load_in_4bit", "load_in_8bit", "device_map", "max_memory", "offload_folder",
           "use_flash_attention_2", "variant")  # fmt: skip
_NO_GPU = {"bf16": False, "fp16": False, "tf32": None, "deepspeed": None, "use_vllm": False, "torch_compile": False,
           "bf16_full_eval": False, "fp16_full_eval": False, "use_liger_kernel": False, "use_cpu": True}  # fmt: skip
_ELSEWHERE = {"report_to": [], "push_to_hub": False, "hub_token": None, "dataset_num_proc": None,
              "dataloader_num_workers": 0, "dataloader_prefetch_factor": None,
              "dataloader_persistent_workers": False}  # fmt: skip


def say(what: str) -> None:
    with open(os.environ["TRIED_WORLD_SAID"], "a", encoding="utf-8") as file:
        file.write(what + "\n")


def script() -> str:
    with open(os.environ["TRIED_WORLD_SCRIPT"], encoding="utf-8") as file:
        return file.read()


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace owner.name by around(original, *arguments, **named); a class method stays one."""
    own = vars(owner).get(name)
    original = own.__func__ if isinstance(own, classmethod) else getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def replaced(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, name, classmethod(replaced) if isinstance(own, classmethod) else replaced)


# --- data ---------------------------------------------------------------------------------------------------------


def _split(rows: Any, asked: str) -> Any:
    """Return what split="train[:10%]" asks of few rows: at least four of them."""
    if not (sliced := re.search(r"\[(-?\d*)(%?):(-?\d*)(%?)\]", asked)):
        return rows
    places = [0, len(rows)]
    for at, (number, percent) in enumerate(((sliced[1], sliced[2]), (sliced[3], sliced[4]))):
        if number and percent:
            places[at] = int(number) * len(rows) // 100 % (len(rows) + 1)
    start = min(places[0], len(rows) - 4)
    return rows.select(range(start, max(places[1], start + 4)))


def _own_rows(kind: str, files: Any) -> Any:
    """Return the first rows of files that the script's repository has; None if it has not."""
    from datasets import Dataset, DatasetDict

    parts = files if isinstance(files, dict) else {"train": files}
    parts = {name: [one] if isinstance(one, str) else list(one or ()) for name, one in parts.items()}
    here = os.path.realpath(os.curdir) + os.sep
    names = [os.path.realpath(one) for part in parts.values() for one in part]
    if kind != "json" or not names or any(one.startswith(here) or not os.path.isfile(one) for one in names):
        return None
    say(f"data set {', '.join(names)}: its first {made_rows.COUNT} rows")
    read = {}
    for name, part in parts.items():
        with open(part[0], encoding="utf-8") as file:
            text = file.read()
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(one) for one in text.splitlines()]
        read[name] = Dataset.from_list(rows[: made_rows.COUNT])
    return DatasetDict(read)


def load_dataset(path: str, name: Any = None, *_: Any, split: Any = None, streaming: bool = False, **named: Any) -> Any:
    from datasets import ClassLabel, Dataset, DatasetDict

    files = str(named.get("data_files") or name or "") if path in ("json", "csv", "text", "parquet") else ""
    if (own := _own_rows(path, named.get("data_files"))) is not None:
        return own if split is None else _split(own["train" if "train" in str(split) else str(split)], str(split))
    columns, splits, known = made_rows.schema(files or f"{path} {name or ''}", script())
    if files:
        columns = made_rows.columns_of_file(files, script())
    if path == "text":
        columns = {"text": made_rows.text}
    if files:
        splits = tuple(named["data_files"]) if isinstance(named.get("data_files"), dict) else ("train",)
    say(
        f"data set {files or path}: {made_rows.COUNT} rows of {', '.join(columns)}"
        + ("" if known else ", which it reads")
    )
    whole = Dataset.from_list(list(made_rows.rows(columns)))
    for column in (one for one, make in columns.items() if make is made_rows.bit):
        whole = whole.cast_column(column, ClassLabel(names=["no", "yes"]))
    if isinstance(split, list):
        return [_split(whole, one) for one in split]

    class Splits(DatasetDict):
        def __missing__(self, asked: str) -> Any:  # of a real name that the small world has not
            return next(iter(self.values()))

    found = _split(whole, str(split)) if split is not None else Splits(dict.fromkeys(splits, whole))
    return found.to_iterable_dataset() if streaming and split is not None else found


def _selected(original: Any, rows: Any, indices: Any, *more: Any, **named: Any) -> Any:
    return original(rows, [one for one in indices if one < len(rows)], *more, **named)


def _item(original: Any, rows: Any, key: Any) -> Any:
    """Return rows[345] of two dozen: pages show one row or other."""
    return original(rows, key % len(rows) if isinstance(key, int) and key >= len(rows) > 0 else key)


def _parted(original: Any, rows: Any, test_size: Any = None, train_size: Any = None, *more: Any, **named: Any) -> Any:
    def fits(size: Any) -> Any:
        few = (isinstance(size, int) and size >= len(rows) // 2) or (isinstance(size, float) and size * len(rows) < 2)
        return 0.25 if few else size

    return original(rows, fits(test_size), None if train_size is None else 0.5, *more, **named)


def _mapped(original: Any, rows: Any, *more: Any, **named: Any) -> Any:
    return original(rows, *more, **(named | {"num_proc": None} if "num_proc" in named else named))


def in_datasets(module: Any) -> None:
    module.load_dataset = sys.modules["datasets.load"].load_dataset = load_dataset
    dataset = module.Dataset
    for owner, split in ((module, "train"), (dataset, "train"), (module.DatasetDict, None)):
        owner.load_from_disk = staticmethod(lambda path, *_, split=split, **__: load_dataset(str(path), split=split))
    for name, around in (
        ("__getitem__", _item),
        ("select", _selected),
        ("train_test_split", _parted),
        ("map", _mapped),
        ("filter", _mapped),
    ):
        wrap(dataset, name, around)
    for name in ("map", "filter"):
        wrap(module.DatasetDict, name, _mapped)


# --- models and sizes ---------------------------------------------------------------------------------------------


def _loaded(original: Any, *arguments: Any, **named: Any) -> Any:
    for name in (*_ON_GPU, *(one for one in named if one.startswith(("bnb_4bit", "llm_int8")))):
        if named.pop(name, None) is not None:
            say(f"from_pretrained({name}) left out")
    attention = named.get("attn_implementation")
    if attention not in (None, "eager", "sdpa"):
        say(f"attention {attention} is sdpa")
        named["attn_implementation"] = "sdpa"
    return original(*arguments, **named)


def _sized(original: Any, arguments: Any) -> None:
    """Shorten a training: the script's own values are read first, and kept where they are smaller."""
    least = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "num_generations"), BATCH)
    least |= dict.fromkeys(("max_length", "max_seq_length", "max_prompt_length"), LENGTH)
    least |= dict.fromkeys(("max_completion_length", "response_length"), ANSWER)
    least |= {"gradient_accumulation_steps": 2, "logging_steps": 1}
    changed = {name: value for name, value in (_NO_GPU | _ELSEWHERE).items() if hasattr(arguments, name)}
    for name, most in least.items():
        own = getattr(arguments, name, None)
        if isinstance(own, int | float) and own > most:
            changed[name] = most
    if hasattr(arguments, "num_generations"):
        changed |= {"num_generations": BATCH, "per_device_train_batch_size": BATCH, "generation_batch_size": None}
    changed["max_steps"] = STEPS if arguments.max_steps < 1 else min(STEPS, arguments.max_steps)
    if getattr(arguments, "fsdp", None):
        changed |= {"fsdp": "", "fsdp_config": None}
    told = [
        name for name, value in changed.items() if name in _NO_GPU and getattr(arguments, name) and value is not True
    ]
    vars(arguments).update(changed)
    if told:
        say(f"{', '.join(told)} switched off")
    original(arguments)


def _answered(original: Any, *arguments: Any, **named: Any) -> Any:
    if "max_length" in named or "max_new_tokens" in named:
        named = {name: one for name, one in named.items() if name != "max_length"} | {"max_new_tokens": 4}
    return original(*arguments, **named)


def _shortened(original: Any, trainer: Any, *arguments: Any, **named: Any) -> None:
    if isinstance(length := named.get("max_seq_length"), int):  # of TRL before 0.13
        named["max_seq_length"] = min(length, LENGTH)
    original(trainer, *arguments, **named)


def in_sft(module: Any) -> None:
    wrap(module.SFTTrainer, "__init__", _shortened)


def in_training_args(module: Any) -> None:
    wrap(module.TrainingArguments, "__post_init__", _sized)


def in_modeling(module: Any) -> None:
    wrap(module.PreTrainedModel, "from_pretrained", _loaded)


def in_tokenizers(module: Any) -> None:
    def fast(original: Any, *arguments: Any, **named: Any) -> Any:
        if named.pop("use_fast", True) is False:
            say("tokenizer: the fast one, stand-ins have no SentencePiece model")
        return original(*arguments, **named)

    wrap(module.AutoTokenizer, "from_pretrained", fast)


def in_transformers(module: Any) -> None:
    if int(module.__version__.partition(".")[0]) < 5:
        whole = sys.modules["transformers"]  # imports its parts when they are asked for
        whole.LlamaTokenizer = whole.LlamaTokenizerFast


def in_auto(module: Any) -> None:
    wrap(module._BaseAutoModelClass, "from_pretrained", _loaded)


def in_generation(module: Any) -> None:
    wrap(module.GenerationMixin, "generate", _answered)


def in_evaluate(module: Any) -> None:
    module.load = lambda *_, **__: MagicMock(name="metric")


def in_hub(module: Any) -> None:
    module.login = module.notebook_login = module.interpreter_login = lambda *_, **__: None


def in_torch(module: Any) -> None:
    def gives(value: Any) -> Callable[..., Any]:  # a function of its own each: torch knows its functions by identity
        return lambda *_, **__: value

    properties = types.SimpleNamespace(name="none", total_memory=8 << 30, major=8, minor=0)
    answers: dict[str, Any] = {"get_device_capability": (8, 0), "get_device_name": "none", "current_device": 0}
    answers |= {"get_device_properties": properties, "mem_get_info": (8 << 30, 8 << 30)}
    answers |= {"max_memory_allocated": 0, "memory_allocated": 0, "set_device": None}
    answers |= {"synchronize": None, "reset_peak_memory_stats": None}
    for name, value in answers.items():
        setattr(module.cuda, name, gives(value))
        if not hasattr(module.cpu, name):
            setattr(module.cpu, name, gives(value))
    module.cpu.get_rng_state = lambda *_: module.get_rng_state()
    module.cpu.set_rng_state = lambda state, *_: module.set_rng_state(state)
    module.cpu.is_bf16_supported = gives(False)
    module.accelerator.current_accelerator = gives(module.device("cpu"))


PATCHES: dict[str, Callable[[Any], None]] = {
    "datasets": in_datasets,
    "transformers.training_args": in_training_args,
    "trl.trainer.sft_trainer": in_sft,
    "transformers.modeling_utils": in_modeling,
    "transformers": in_transformers,
    "transformers.models.auto.tokenization_auto": in_tokenizers,
    "transformers.models.auto.auto_factory": in_auto,
    "transformers.generation.utils": in_generation,
    "evaluate": in_evaluate,
    "huggingface_hub": in_hub,
    "torch": in_torch,
}


class _After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes a module as soon as it is imported."""

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loaders[module.__name__]
        module.__loader__.exec_module(module)
        PATCHES[module.__name__](module)


def _modelscope(name: str) -> Any:
    """Of modelscope only what stands for transformers and its download: an id is one on the hub."""
    if name == "snapshot_download":
        return lambda model_id, *_, **__: model_id
    import transformers

    return getattr(transformers, name)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of trackers and notebooks that are not installed: whatever is called in them does nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == one or name.startswith(f"{one}.") for one in _TRACKERS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__path__ = []  # type: ignore[attr-defined]
        module.__getattr__ = functools.cache(lambda name: _absent(spec.name, name))  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: Any) -> None:
        say(f"{module.__name__} does nothing")


def _absent(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if module.startswith("modelscope"):
        return _modelscope(name)
    if name.endswith("Callback"):
        from transformers import TrainerCallback

        return type(name, (TrainerCallback,), {"__module__": module, "__init__": lambda *_, **__: None})
    mock = MagicMock(name=f"{module}.{name}")
    mock.get.return_value = mock.get_secret.return_value = "x"
    return mock


builtins.input = getpass.getpass = lambda *_: "x"
builtins.display = print  # type: ignore[attr-defined]  # of notebooks
resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
sys.meta_path.insert(0, _After())
sys.meta_path.append(_Absent())
