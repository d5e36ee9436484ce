"""Collect and write what a script has built: data, settings, model, adapter, and what surefoot cannot take over."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import replace
from .rows import NO_LABEL, Collate, Written, collated, is_random, write_rows
from .weights import base_state, clear_weights, drop_quantisation, is_same, link_weights, source_of

TAKEN = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")
"""Trainers whose loss is the cross entropy of marked tokens."""

RECORD = "handover.json"
_LIBRARIES = ("transformers", "trl", "peft")
_USUAL = (
    "DefaultFlowCallback",
    "ProgressCallback",
    "PrinterCallback",
    "NotebookProgressCallback",
    "RichProgressCallback",
)
_UNUSED = ("compute_metrics", "preprocess_logits_for_metrics")  # affect what is reported about evaluations


class HandOver:
    """Collects and writes what the script built."""

    def __init__(self, trainer: Any, folder: Path):
        self._trainer, self._folder = trainer, folder
        self._refused: list[dict[str, Any]] = []
        self._noted: list[dict[str, Any]] = []
        self._stopping: dict[str, Any] = {}
        self._rows: Any = None
        self._collate: Any = None

    def write(self, resume: Any) -> None:
        trainer = self._trainer
        folder = self._folder
        if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
            raise SystemExit(f"error: {folder} has files that surefoot did not write; move them away")
        folder.mkdir(parents=True, exist_ok=True)
        known = self._known_class()
        self._look_at_trainer(known)
        facts: dict[str, Any] = {}
        for part in (self._write_data, self._write_model):
            if all(one["droppable"] for one in self._refused):
                facts |= part()
        record = {
            "trainer": known.__name__,
            "versions": _versions(),
            "arguments": _arguments(trainer.args) | self._stopping,
            "defaults": _defaults(trainer.args),
            "devices": max(1, int(getattr(trainer.args, "n_gpu", 1))),
            "resume": bool(resume),
            "whole_step_mean": _counts(trainer) and bool(getattr(trainer, "model_accepts_loss_kwargs", False)),
            "refused": self._refused,
            "noted": self._noted,
            **facts,
        }
        replace(folder / RECORD, json.dumps(record, indent=1, default=str))

    def _refuse(self, name: str, what: str, fix: str = "", *, droppable: bool = False) -> None:
        self._refused.append({"name": name, "what": what, "fix": fix, "droppable": droppable})

    def _note(self, name: str, what: str) -> None:
        self._noted.append({"name": name, "what": what})

    def _known_class(self) -> type:
        """Return the nearest base class of a library."""
        return next(one for one in type(self._trainer).__mro__ if one.__module__.partition(".")[0] in _LIBRARIES)

    def _look_at_trainer(self, known: type) -> None:
        trainer = self._trainer
        if known.__name__ not in TAKEN:
            fix = "translate its settings instead: surefoot translate SCRIPT"
            self._refuse(known.__name__, f"is not taken over; {', '.join(TAKEN)} are", fix)
        for name in sorted(_overridden(type(trainer), known)):
            self._refuse(name, f"{type(trainer).__name__} has its own {name}", droppable=True)
        if getattr(trainer, "compute_loss_func", None) is not None:
            self._refuse("compute_loss_func", "the trainer has its own loss", droppable=True)
        for name in ("optimizer", "lr_scheduler", "optimizer_cls_and_kwargs"):
            if getattr(trainer, name, None) is not None:
                self._refuse(name, f"the script passed its own {name}", droppable=True)
        if trainer.model_init is not None:
            self._refuse("model_init", "the trainer would build the model in train()", "pass model= instead")
        for name in _UNUSED:
            if getattr(trainer, name, None) is not None:
                self._note(name, "evaluations report the loss only")
        for callback in trainer.callback_handler.callbacks:
            self._look_at_callback(callback)

    def _look_at_callback(self, callback: Any) -> None:
        kind = type(callback)
        if kind.__name__ == "EarlyStoppingCallback":
            for name in ("early_stopping_patience", "early_stopping_threshold"):
                self._stopping[name] = getattr(callback, name)
        elif kind.__name__ in _USUAL or kind.__module__.startswith("transformers.integrations"):
            return  # progress bars and trackers; the arguments name the trackers
        else:
            self._refuse(kind.__name__, "is a callback, which surefoot does not call", droppable=True)

    def _write_data(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer.train_dataset is None:
            self._refuse("train_dataset", "the trainer has no training data")
            return {}
        loader = trainer.get_train_dataloader()
        self._rows, self._collate = loader.dataset, loader.collate_fn
        if not hasattr(self._rows, "__len__"):
            self._refuse("train_dataset", "is a stream, whose rows cannot be counted", "load the data set whole")
            return {}
        if is_random(self._rows, self._collate):
            what = "draws at random: the same row gives other tokens or labels"
            self._refuse(type(trainer.data_collator).__name__, what)
            return {}
        trained = self._write_rows("train", self._rows, self._collate)
        facts = {
            "steps": _steps(trainer, loader),
            "rows": len(self._rows),
            "places": trained.places,
            "longest": trained.longest,
        }
        held = trainer.eval_dataset
        if isinstance(held, Mapping):
            self._note("eval_dataset", f"of {len(held)} sets only the first is evaluated")
            held = next(iter(held.values()))
        if held is not None and trainer.args.eval_strategy != "no":
            loader = trainer.get_eval_dataloader(held)
            evaluated = self._write_rows("eval", loader.dataset, loader.collate_fn)
            facts["eval_rows"] = len(evaluated.places)
            facts["longest"] = max(facts["longest"], evaluated.longest)
        return facts

    def _write_rows(self, name: str, rows: Any, collate: Collate) -> Written:
        written = write_rows(self._folder / f"{name}.jsonl", rows, collate)
        if written.fault:
            self._refuse(f"{name}_dataset", written.fault)
        if written.empty:
            self._note(f"{name}_dataset", f"{written.empty} rows without a label are left out")
        return written

    def _write_model(self) -> dict[str, Any]:
        trainer, folder = self._trainer, self._folder / "model"
        model = trainer.model
        adapter = getattr(model, "peft_config", None) if hasattr(model, "get_base_model") else None
        base = model.get_base_model() if adapter else model
        facts: dict[str, Any] = {"dtype": str(next(base.parameters()).dtype).removeprefix("torch.")}
        quantised = getattr(base.config, "quantization_config", None)
        if quantised is not None:
            facts["quantised"] = quantised if isinstance(quantised, dict) else quantised.to_dict()
        self._look_at_parameters(model, bool(adapter))
        folder.mkdir(exist_ok=True)
        source = source_of(base)
        facts["source"] = str(base.config._name_or_path)
        if quantised is not None and source is not None:
            link_weights(source, folder)
            base.config.save_pretrained(folder)
            drop_quantisation(folder / "config.json")
        elif source is not None and is_same(base_state(base), source):
            link_weights(source, folder)
            base.config.save_pretrained(folder)
        else:
            clear_weights(folder)
            base.save_pretrained(folder, state_dict=base_state(base))
            facts["saved"] = True
        if getattr(base, "generation_config", None) is not None:
            base.generation_config.save_pretrained(folder)
        self._write_tokenizer(folder, source)
        if adapter:
            if list(adapter) != ["default"]:
                self._refuse("adapter", f"the model has the adapters {', '.join(adapter)}", "use one, called default")
                return facts
            model.save_pretrained(self._folder / "adapter")
            facts["adapter"] = json.loads((self._folder / "adapter/adapter_config.json").read_text())
            facts["adapted"] = _adapted(base, facts["adapter"]["target_modules"])
        return facts

    def _look_at_parameters(self, model: Any, adapted: bool) -> None:
        frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
        if adapted:
            odd = [
                name
                for name, one in model.named_parameters()
                if one.requires_grad and "lora_" not in name and "modules_to_save" not in name
            ]
            if odd:
                self._refuse("requires_grad", f"{len(odd)} weights train beside the adapter, first {odd[0]}")
        elif frozen:
            what = f"{len(frozen)} weights are frozen by the script, first {frozen[0]}"
            self._refuse("requires_grad", what, "surefoot trains all weights, or an adapter")

    def _write_tokenizer(self, folder: Path, source: Path | None) -> None:
        trainer = self._trainer
        tokenizer = getattr(trainer, "processing_class", None) or getattr(trainer, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            return
        found = [] if source is None else [path for path in source.iterdir() if "token" in path.name]
        for path in found:
            shutil.copyfile(path, folder / path.name)
        if not found:
            self._refuse("processing_class", "the trainer has no tokenizer", "pass processing_class=tokenizer")

    def loss_of(self, places: Sequence[int]) -> dict[str, Any]:
        """Return the trainer's loss and gradient norm of these rows, in fp32 and without dropout, per learned token.
        counted: the tokens by which the trainer itself divides, for each learned one."""
        import torch

        trainer, model = self._trainer, self._trainer.model
        dtypes = {name: one.dtype for name, one in model.named_parameters() if one.is_floating_point()}
        training = model.training
        model.eval()
        if getattr(model.config, "quantization_config", None) is None:
            model.float()
        try:
            batch = collated(self._rows, self._collate, list(places))
            device = next(model.parameters()).device
            batch, more = _with_count(trainer, batch, device)
            inputs = trainer._prepare_inputs(batch)
            model.zero_grad()
            with torch.enable_grad():
                loss = trainer.compute_loss(model, inputs, **more)
            loss.backward()
            squares = [float(one.grad.double().square().sum()) for one in model.parameters() if one.grad is not None]
            # Transformers before 5 count the first token of each row as well, which nothing predicts.
            learned = int((batch["labels"][..., 1:] != NO_LABEL).sum())
            counted = int(more.get("num_items_in_batch") or learned) / learned
            return {
                "loss": float(loss.detach()) * counted,
                "norm": math.sqrt(sum(squares)) * counted,
                "counted": counted,
            }
        finally:
            model.zero_grad()
            for name, one in model.named_parameters():
                if name in dtypes:
                    one.data = one.data.to(dtypes[name])  # exact: the values came from this dtype
            model.train(training)


def _counts(trainer: Any) -> bool:
    """Whether this version of transformers divides by the tokens of a whole step (4.46 and later)."""
    return hasattr(trainer, "get_batch_samples")


def _with_count(trainer: Any, batch: Any, device: Any) -> tuple[Any, dict[str, Any]]:
    """Return the batch, and the arguments of compute_loss that count its items."""
    if not _counts(trainer):
        return batch, {}
    given = (iter([batch]), 1, device)[: len(inspect.signature(trainer.get_batch_samples).parameters)]
    samples, count = trainer.get_batch_samples(*given)
    return samples[0], {"num_items_in_batch": count}


def _steps(trainer: Any, loader: Any) -> int:
    """Return the number of steps that the trainer would take; versions count the end of an epoch differently."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    if (counted := getattr(trainer, "set_initial_training_values", None)) is not None:
        whole = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        given = (args, loader, whole)[: len(inspect.signature(counted).parameters)]
        return counted(*given)[-1]
    in_epoch = max(len(loader) // args.gradient_accumulation_steps, 1)
    return math.ceil(args.num_train_epochs * in_epoch)


def _adapted(base: Any, targets: Any) -> list[str]:
    """Return names that select the adapted modules: as given, or the full ones if a pattern was given."""
    if isinstance(targets, list):
        return sorted(targets)
    return sorted(name for name, module in base.named_modules() if hasattr(module, "lora_A"))


def _overridden(kind: type, known: type) -> set[str]:
    """Return the names of the library's methods that the script's subclasses replace."""
    own = (name for one in kind.__mro__[: kind.__mro__.index(known)] for name in vars(one))
    return {name for name in own if not name.startswith("__") and callable(getattr(known, name, None))}


def _arguments(args: Any) -> dict[str, Any]:
    return {name: value for name, value in args.to_dict().items() if not callable(value)}


def _defaults(args: Any) -> dict[str, Any]:
    """Return the default of each argument that has a plain one."""
    plain = (type(None), bool, int, float, str)
    found = {field.name: field.default for field in dataclasses.fields(args)}
    return {name: value for name, value in found.items() if isinstance(value, plain)}


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("torch", "transformers", "trl", "peft", "datasets"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
