"""Load a model folder strictly: every weight comes from a file, has the planned dtype and is finite.

`load_model` reads safetensors only, runs no code from the folder, and raises errors where transformers would continue
(missing weights initialized at random, mismatched shapes, NaN). This costs one extra pass over the weights. A folder in
a layout other than transformers' is recognized by its tensor names and converted with rules
(`surefoot.models.convert`). Variants that transformers itself reads (a backbone without prefix, buffers saved by older
versions) are left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from surefoot.data.tokenize.segments import tokenizer_errors
from surefoot.models.convert.recognize import Recognized, Target, recognize
from surefoot.models.convert.safetensors_file import StoredTensor
from surefoot.models.convert.tensors import Tensors, some
from surefoot.models.embeddings import check_tied, resize_vocabulary
from surefoot.models.facts import facts_of, model_config, one_line
from surefoot.models.folder import plain_tensors, stored_tensors
from surefoot.models.precision import is_finite
from surefoot.models.quiet import quiet_libraries
from surefoot.models.value_head import is_of_value_head
from surefoot.models.wrapped import LEFT_OUT, auto_class, freeze_wrapper, is_wrapper, left_out, says_tied
from surefoot.system.errors import EnvironmentFault, Fault, InputError

_MOVERS = 4  # threads that copy weights to a device; transformers reads files with as many


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder, without remote code. Raises InputError if it cannot be read."""
    try:
        with quiet_libraries(), tokenizer_errors(folder):
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except InputError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot read
        what = f"the tokenizer cannot be read: {one_line(error)}"
        fix = "tokenizer.json must be in the same folder as the weights"
        raise InputError(Fault(str(folder), what, fix, code="SF-TOKENIZER")) from error


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    attention_implementation: str,
    device: torch.device,
    vocab_rows: int | None = None,
    notify: Callable[[str], object] | None = None,
    scored: bool = False,
) -> PreTrainedModel:
    """Load the causal language model in `folder`, in eval mode, with all floating-point parameters in `dtype`.

    attention_implementation: eager | sdpa | flash_attention_2.
    device: where to put the model.
    vocab_rows: number of embedding rows to extend the model to (see `resize_vocabulary`).
    notify: called with a message if the files need conversion from another layout.
    scored: whether this is a reward model. Its value head is left to `value_head_tensors`; if it has no output head,
        which it does not need, the embedding is used in its place.

    Raises InputError for anything that is not an intact model; each fault names a file or tensor.
    """
    config = model_config(folder)
    stored = stored_tensors(folder)
    if scored:
        stored = {name: tensor for name, tensor in stored.items() if not is_of_value_head(name)}
        if not any(name.endswith(f"{facts_of(folder).head}.weight") for name in stored):
            config.tie_word_embeddings = True
    tensors = plain_tensors(folder)
    if scored:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_of_value_head(name)}
    with _library_faults(folder):
        converted = other_layout(tensors, config, folder)
    as_files = tensors.keys() == stored.keys() and not scored
    given = converted.tensors if converted else None if as_files else tensors
    model, info = _open(folder, config, dtype, attention_implementation, given)
    if converted and notify:
        notify(layout_message(folder, converted.layouts, value_head=bool(converted.value_head)))
    tensors = converted.tensors if converted else tensors
    _move(model, device)
    faults = [*_key_faults(info, stored, folder), *_non_finite(model, tensors, stored, folder, dtype)]
    if faults:
        raise InputError(faults)
    check_tied(model, str(folder))
    _loop_over_narrow_experts(model)
    freeze_wrapper(model)
    if not scored:
        keep_left_out(model, folder)
    if vocab_rows is not None:
        resize_vocabulary(model, vocab_rows)
    return model


def draw_model(folder: Path, *, seed: int, dtype: torch.dtype, attention: str, device: torch.device) -> PreTrainedModel:
    """Return the model of `folder` with random weights, as transformers initializes them, in eval mode. They are drawn
    on the CPU in fp32, so that they depend on the seed alone.

    attention, device: as in `load_model`. Raises InputError for a config that is none of a language model.
    """
    config = model_config(folder)
    with _library_faults(folder), quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation=attention)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    _move(model.to(dtype), device)
    _loop_over_narrow_experts(model)
    freeze_wrapper(model)
    return model.eval()


def _move(model: PreTrainedModel, device: torch.device) -> None:
    """Put the model on the device. Its weights are still pages of the files, which a single thread would read, map and
    copy one after the other."""
    own = list(model.parameters())
    if device.type != "cpu":
        device = torch.empty(0, device=device).device  # with its number: the current device is a thread's own
        with ThreadPoolExecutor(_MOVERS) as movers:
            for one, moved in zip(own, movers.map(lambda one: one.data.to(device), own), strict=True):
                one.data = moved
    model.to(device)  # pyright: ignore[reportArgumentType]  # a decorator of transformers hides the signature


def _loop_over_narrow_experts(model: PreTrainedModel) -> None:
    """Use the eager loop over experts if their rows are not multiples of 16 bytes, as torch's `grouped_mm` requires."""
    experts = [one for name, one in model.named_parameters() if one.ndim == 3 and "experts" in name.split(".")]
    if any(one.shape[-1] * one.element_size() % 16 for one in experts) and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def keep_left_out(model: PreTrainedModel, folder: Path) -> None:
    """Attach the file tensors that transformers did not load, so that `surefoot.models.save` can write them again."""
    tensors = plain_tensors(folder)
    setattr(model, LEFT_OUT, {name: tensors[name] for name in left_out(model, tensors)})


def layout_caution(folder: Path) -> str | None:
    """Return the message that `load_model` would send to `notify`, without reading weights. Raises InputError as it
    does."""
    with _library_faults(folder):
        found = other_layout(plain_tensors(folder), model_config(folder), folder)
    return layout_message(folder, found.layouts, value_head=bool(found.value_head)) if found else None


def _open(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, attention_implementation: str, converted: Tensors | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """converted: tensors to load instead of the folder's files; transformers reads them one at a time."""
    settings: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": attention_implementation,
        "ignore_mismatched_sizes": True,  # they are listed in the info, and `_key_faults` reports all at once
        "output_loading_info": True,
    }
    with _library_faults(folder), quiet_libraries():
        if converted is not None:
            model_class: Any = auto_class(config)._model_mapping[type(config)]
            if (folder / "generation_config.json").is_file():
                settings["generation_config"] = GenerationConfig.from_pretrained(folder, local_files_only=True)
            return model_class.from_pretrained(None, state_dict=dict(converted), **settings)
        return auto_class(config).from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, local_files_only=True, **settings
        )


@contextmanager
def _library_faults(folder: Path) -> Iterator[None]:
    """Convert the exceptions of transformers for invalid configs and unreadable files to one-line faults."""
    try:
        yield
    except ImportError as error:
        fix = "choose sdpa or eager"
        raise EnvironmentFault(Fault("attention", one_line(error), fix, code="SF-MODEL-KIND")) from error
    except (ValueError, OSError, TypeError, AssertionError, KeyError) as error:
        raise InputError(Fault(str(folder), one_line(error), code="SF-MODEL-KIND")) from error


def _key_faults(info: Mapping[str, Any], stored: Mapping[str, StoredTensor], folder: Path) -> list[Fault]:
    """Return faults for missing, unexpected and mismatched weights; nothing is ever initialized at random."""
    faults = []
    for key, what in (
        ("missing_keys", "weights required by the config are missing"),
        ("unexpected_keys", "weights that are not part of the model"),
    ):
        if names := sorted(info[key]):
            what = f"{len(names)} {what}: {some(names)}"
            faults.append(Fault(_file_of(names[0], stored, folder), what, code="SF-MODEL-KEYS"))
    if mismatched := sorted(info["mismatched_keys"]):
        name, on_disk, expected = mismatched[0]
        what = f"{len(mismatched)} weights do not fit config.json, first {name}: {list(on_disk)} in the file"
        what = f"{what}, {list(expected)} by the config"
        faults.append(Fault(_file_of(name, stored, folder), what, code="SF-MODEL-KEYS"))
    return faults


def _non_finite(
    model: PreTrainedModel, tensors: Tensors, stored: Mapping[str, StoredTensor], folder: Path, dtype: torch.dtype
) -> list[Fault]:
    faults = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point() or is_finite(tensor):
            continue
        place = _file_of(name, stored, folder)
        if name in tensors and is_finite(tensors[name].read()):
            largest = torch.finfo(dtype).max
            what = f"{name} overflows {str(dtype).removeprefix('torch.')}, whose largest value is {largest:g}"
            faults.append(Fault(place, what, "load the base in bf16 or fp32 (precision.base)", code="SF-MODEL-NUMBERS"))
        else:
            count = int((~torch.isfinite(tensor)).sum())
            what = f"{name} has {count:,} of {tensor.numel():,} values that are NaN or infinite"
            fix = "the file is damaged or its training diverged; get another copy"
            faults.append(Fault(place, what, fix, code="SF-MODEL-NUMBERS"))
    return faults


def _file_of(name: str, stored: Mapping[str, StoredTensor], folder: Path) -> str:
    """Return the file that holds this tensor, or the folder if none does."""
    return str(stored[name].file if name in stored else folder)


_LEFT_TO_TRANSFORMERS = frozenset({"backbone", "buffers"})


def expected_tensors(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every weight of a model with this config, including a tied head, without allocating."""
    key = config.to_json_string(use_diff=False)
    if key not in _EXPECTED:
        with quiet_libraries(), torch.device("meta"):
            model = auto_class(config).from_config(config)
        _EXPECTED[key] = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return _EXPECTED[key]


_EXPECTED: dict[str, dict[str, tuple[int, ...]]] = {}  # by config; a run asks at its plan and when it loads the weights


def other_layout(stored: Tensors, config: PreTrainedConfig, folder: Path) -> Recognized | None:
    """Return the conversion for these files; None if transformers reads them directly or should report the error.

    Raises InputError if a layout is recognized but weights are missing, unexpected or of the wrong shape.
    """
    expected = expected_tensors(config)
    if is_wrapper(config):  # transformers itself renames the prefixes of such files
        return None
    if all(expected.get(name) == tensor.shape for name, tensor in stored.items()):
        return None
    facts = replace(facts_of(folder), tied=says_tied(config))
    found = recognize(stored, Target(expected, facts), str(folder))
    if set(found.layouts) <= _LEFT_TO_TRANSFORMERS:
        if any(name.endswith("attn.bias") for name in found.tensors.keys() - expected.keys()):
            raise InputError(found.faults)  # transformers would silently drop it as a causal mask
        return None
    if found.faults:
        raise InputError(found.faults)
    return found


def layout_message(folder: Path, layouts: Sequence[str], *, value_head: bool = False) -> str:
    """Return the message that a folder's weights are converted from another layout."""
    head = "; its value head is not part of the model" if value_head else ""
    return f"{folder} is in another layout ({', '.join(layouts)}) and is read through rules{head}"
