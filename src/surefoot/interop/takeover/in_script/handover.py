"""Collect and write what a script has built: data, settings, model, adapter, and what surefoot cannot take over."""

from __future__ import annotations

import inspect
import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import own_loss
from .arguments import LIBRARIES, defaults_of, evaluates, values_of
from .files import replace
from .own_code import LOSS, harmless_callback, harmless_method, overridden
from .rewards import what_else_answers, words_of
from .rows import (
    Collate,
    Documents,
    Written,
    is_packed,
    is_random,
    judged_of,
    pair_of,
    row_of,
    scored_pair,
    sides_of,
    write_prompts,
    write_rows,
)
from .weights import head_of, scores, source_of, write_adapter, write_base, write_head, write_reference

_SCORING = "RewardTrainer"
_READ = {"ORPOTrainer": sides_of, "CPOTrainer": sides_of, "KTOTrainer": judged_of}
ANSWERING = ("GRPOTrainer", "RLOOTrainer")  # have prompts, and rewards for the answers
_LABELLED = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")  # have rows with labels
TAKEN = (*_LABELLED, _SCORING, "DPOTrainer", *_READ, *ANSWERING)

RECORD, MARK = "handover.json", ".surefoot"
_SHOWN = 8  # prompts whose tokens are compared
_UNUSED = ("compute_metrics", "preprocess_logits_for_metrics")  # affect what is reported about evaluations


class HandOver:
    """Collects and writes what the script built."""

    def __init__(self, trainer: Any, folder: Path):
        self._trainer, self._folder = trainer, folder
        # the nearest base class of a library
        self._known = next(one for one in type(trainer).__mro__ if one.__module__.partition(".")[0] in LIBRARIES)
        self._refused: list[dict[str, Any]] = []
        self._noted: list[dict[str, Any]] = []
        self._stopping: dict[str, Any] = {}
        self._rows: Any = None
        self._collate: Any = None

    def write(self, resume: Any, processes: int) -> None:
        """Write everything into the folder, anew. processes: how many a launcher would have started."""
        trainer, folder = self._trainer, self._folder
        if folder.exists():
            if not (folder / MARK).is_file():
                raise SystemExit(f"error: surefoot did not write {folder}; move it away")
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / MARK).touch()
        self._look_at_trainer()
        facts: dict[str, Any] = {}
        for part in (lambda: self._write_data(processes), self._write_model):
            if all(one["droppable"] for one in self._refused):
                facts |= part()
        record = {
            "trainer": self._known.__name__,
            "arguments": values_of(trainer.args) | self._stopping | _balance(trainer),
            "defaults": defaults_of(trainer.args),
            "devices": max(1, int(getattr(trainer.args, "n_gpu", 1))),
            "resume": resume if resume in (None, True, False) else str(resume),
            "routed": _is_routed(trainer.model.config),
            "whole_step_mean": self._divides_by_step(),
            "refused": self._refused,
            "noted": self._noted,
            **facts,
        }
        replace(folder / RECORD, json.dumps(record, indent=1, default=str))

    def _divides_by_step(self) -> bool:
        """Whether a token of every micro-batch weighs the same."""
        own = any(one["compared"] for one in self._refused)
        accepts = bool(getattr(self._trainer, "model_accepts_loss_kwargs", False))
        return own_loss.counts(self._trainer) and accepts and not own

    def _refuse(self, name: str, what: str, fix: str = "", *, droppable: bool = False, compared: bool = False) -> None:
        """compared: it is taken where the comparison before step 1 finds nothing."""
        found = {"name": name, "what": what, "fix": fix, "droppable": droppable, "compared": compared}
        self._refused.append(found)

    def _note(self, name: str, what: str) -> None:
        self._noted.append({"name": name, "what": what})

    def _look_at_trainer(self) -> None:
        trainer, known = self._trainer, self._known
        if known.__name__ not in TAKEN:
            fix = "translate its settings instead: surefoot translate SCRIPT"
            self._refuse(known.__name__, f"is not taken over; {', '.join(TAKEN)} are", fix)
        compared = known.__name__ not in ANSWERING
        for name in overridden(type(trainer), known):
            if what := harmless_method(name):
                self._note(name, what)
            else:
                what = f"{type(trainer).__name__} has its own {name}"
                self._refuse(name, what, droppable=True, compared=compared and name == LOSS)
        if getattr(trainer, "compute_loss_func", None) is not None:
            self._refuse("compute_loss_func", "the trainer has its own loss", droppable=True, compared=compared)
        for name in ("optimizer", "lr_scheduler", "optimizer_cls_and_kwargs"):
            if getattr(trainer, name, None) is not None:
                self._refuse(name, f"the script passed its own {name}", droppable=True)
        if trainer.model_init is not None:
            self._refuse("model_init", "the trainer would build the model in train()", "pass model= instead")
        for name in _UNUSED:
            if getattr(trainer, name, None) is not None:
                self._note(name, "evaluations report the loss only")
        if getattr(trainer.args, "center_rewards_coefficient", None) is not None:
            what = "surefoot's scores have a bias, which would train with it"
            self._refuse("center_rewards_coefficient", what, "leave it out")
        for callback in trainer.callback_handler.callbacks:
            self._look_at_callback(callback)

    def _look_at_callback(self, callback: Any) -> None:
        kind = type(callback)
        if kind.__name__ == "EarlyStoppingCallback":
            for name in ("early_stopping_patience", "early_stopping_threshold"):
                self._stopping[name] = getattr(callback, name)
        elif (what := harmless_callback(callback)) is None:
            self._refuse(kind.__name__, "is a callback, which surefoot does not call", droppable=True)
        elif what:
            self._note(kind.__name__, what)

    def _write_data(self, processes: int) -> dict[str, Any]:
        trainer = self._trainer
        if trainer.train_dataset is None:
            self._refuse("train_dataset", "the trainer has no training data")
            return {}
        loader = trainer.get_train_dataloader()
        self._rows, self._collate = loader.dataset, loader.collate_fn
        if not hasattr(self._rows, "__len__"):
            self._refuse("train_dataset", "is a stream, whose rows cannot be counted", "load the data set whole")
            return {}
        if self._known.__name__ in ANSWERING:
            return self._write_prompts(_steps(trainer, loader, processes))
        if packed := is_packed(self._rows):
            self._rows = Documents(self._rows)
        if is_random(self._rows, self._collate):
            what = "draws at random: the same row gives other tokens or labels"
            self._refuse(type(trainer.data_collator).__name__, what)
            return {}
        trained = self._write_rows("train", self._rows, self._collate)
        facts = {
            "steps": _steps(trainer, loader, processes),
            "places": trained.places,
            "longest": trained.longest,
            "row_tokens": trainer.args.max_length if packed else None,
        }
        held = trainer.eval_dataset
        if isinstance(held, Mapping):
            self._note("eval_dataset", f"of {len(held)} sets only the first is evaluated")
            held = next(iter(held.values()))
        if held is not None and evaluates(trainer.args):
            loader = trainer.get_eval_dataloader(held)
            held = Documents(loader.dataset) if is_packed(loader.dataset) else loader.dataset
            evaluated = self._write_rows("eval", held, loader.collate_fn)
            facts["eval_rows"] = len(evaluated.places)
            facts["longest"] = max(facts["longest"], evaluated.longest)
        return facts

    def _write_prompts(self, steps: int) -> dict[str, Any]:
        """Write the records as they are; their other fields are what rewards read."""
        trainer = self._trainer
        held = trainer.eval_dataset if evaluates(trainer.args) else None
        sets = {"train": trainer.train_dataset, **({} if held is None else {"eval": held})}
        for name, rows in sets.items():
            if fault := write_prompts(self._folder / f"{name}.jsonl", rows):
                self._refuse(f"{name}_dataset", fault)
                return {}
        first = [row["prompt"] for row in trainer.train_dataset.select(range(min(_SHOWN, len(trainer.train_dataset))))]
        words, faults = words_of(trainer)
        for name, what, fix in (*faults, *what_else_answers(trainer)):
            self._refuse(name, what, fix)
        return {
            "steps": steps,
            "places": list(range(len(trainer.train_dataset))),
            "eval_rows": 0 if held is None else len(held),
            "prompts": trainer._tokenize_prompts(first)[0],
            "rewards": words,
        }

    def _write_rows(self, name: str, rows: Any, collate: Collate) -> Written:
        read = _READ.get(self._known.__name__, row_of)
        if self._known.__name__ == "DPOTrainer":
            read = pair_of(self._trainer.args.max_length)
        elif self._known.__name__ == _SCORING:
            read = scored_pair(self._trainer.model.config.get_text_config().pad_token_id)
        written = write_rows(self._folder / f"{name}.jsonl", rows, collate, read)
        if written.fault:
            self._refuse(f"{name}_dataset", written.fault)
        elif not written.places and name == "train":
            self._refuse("train_dataset", "has no row with a label after its first token")
        elif not written.places:
            self._note("eval_dataset", "has no row with a label after its first token: nothing is evaluated")
        elif written.empty:
            self._note(f"{name}_dataset", f"{written.empty} rows without a label are left out")
        return written

    def _write_model(self) -> dict[str, Any]:
        trainer, folder = self._trainer, self._folder / "model"
        model = trainer.model
        adapter = getattr(model, "peft_config", None) if hasattr(model, "get_base_model") else None
        base = model.get_base_model() if adapter else model
        facts: dict[str, Any] = {"dtype": str(next(base.parameters()).dtype).removeprefix("torch.")}
        quantized = getattr(base.config, "quantization_config", None)
        if quantized is not None:
            facts["quantised"] = quantized if isinstance(quantized, dict) else quantized.to_dict()
        if adapter and (others := sorted({str(_kind(one)) for one in adapter.values()} - {"LORA"})):
            self._refuse("adapter", f"is of PEFT's kind {', '.join(others)}; LoRA and DoRA are trained here")
            return facts
        if _looks_ahead(base.config):
            self._refuse("model", f"{base.config.model_type} sees the tokens that follow; surefoot trains decoders")
            return facts
        self._look_at_parameters(model, bool(adapter))
        if adapter and not adapter.keys() <= {"default", "ref"}:
            self._refuse("adapter", f"the model has the adapters {', '.join(adapter)}", "use one, called default")
            return facts
        facts["saved"], fault = write_base(base, folder)
        if fault:
            self._refuse("model", fault)
            return facts
        self._write_tokenizer(folder, source_of(base))
        if self._known.__name__ == _SCORING:
            write_head(base, folder)
        if adapter:
            facts["adapter"] = write_adapter(model, self._folder / "adapter")
            facts["adapted"] = _adapted(base, facts["adapter"]["target_modules"])
        if hasattr(trainer, "ref_model"):
            facts["reference"], fault = write_reference(model, trainer.ref_model, self._folder)
            if fault:
                self._refuse("ref_model", fault)
            elif facts["reference"] == "reference":
                self._write_tokenizer(self._folder / "reference", None)
                if self._known.__name__ == "KTOTrainer":
                    what = "is another model than the trained one: its KL term pairs other prompts than here"
                    self._refuse("ref_model", what)
            if facts["reference"] and self._known.__name__ in ANSWERING:
                self._refuse("ref_model", "is not the model without an adapter, which is the reference here")
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
            base = model.get_base_model()
            if scores(base) and not head_of(base).weight.requires_grad:
                self._refuse("requires_grad", "the head for scores is frozen", 'set modules_to_save=["score"]')
        elif frozen:
            what = f"{len(frozen)} weights are frozen by the script, first {frozen[0]}"
            self._refuse("requires_grad", what, "surefoot trains all weights, or an adapter")

    def _write_tokenizer(self, folder: Path, source: Path | None) -> None:
        trainer = self._trainer
        holders = ((trainer, "processing_class"), (trainer, "tokenizer"), (trainer.data_collator, "tokenizer"))
        tokenizer = next((found for one, name in holders if (found := getattr(one, name, None)) is not None), None)
        tokenizer = tokenizer or self._only_tokenizer()
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            return
        found = [] if source is None else [path for path in source.iterdir() if "token" in path.name]
        for path in found:
            shutil.copyfile(path, folder / path.name)
        if not found:
            self._refuse("processing_class", "the trainer has no tokenizer", "pass processing_class=tokenizer")

    def _only_tokenizer(self) -> Any:
        """Return the tokenizer that stands in the script under a name of its own; None where there are several."""
        from transformers import PreTrainedTokenizerBase

        named = vars(sys.modules["__main__"]).values()
        found = {id(one): one for one in named if isinstance(one, PreTrainedTokenizerBase)}
        if len(found) != 1:
            return None
        self._note("processing_class", "the trainer has none: the script's only tokenizer is taken")
        return next(iter(found.values()))

    def loss_of(self, places: Sequence[int], dropped: Sequence[str] = ()) -> dict[str, Any]:
        """Return `own_loss.loss_of` these rows. dropped: methods of the script's own that are not called."""
        kind = self._known if "compute_loss" in dropped else type(self._trainer)
        own = any(one["compared"] and one["name"] not in dropped for one in self._refused)
        return own_loss.loss_of(self._trainer, kind, self._rows, self._collate, places, dropped, own=own)


class _Share:
    """The batches of one of several processes. Stands in for a DataLoader where only its length counts."""

    def __init__(self, loader: Any, processes: int):
        self._length, self.dataset = math.ceil(len(loader) / processes), loader.dataset

    def __len__(self) -> int:
        return self._length


def _steps(trainer: Any, loader: Any, processes: int) -> int:
    """Return the number of steps that the trainer would take; versions count the end of an epoch differently."""
    args, share = trainer.args, _Share(loader, processes)
    if args.max_steps > 0:
        return args.max_steps
    if (counted := getattr(trainer, "set_initial_training_values", None)) is not None:
        whole = args.train_batch_size * args.gradient_accumulation_steps * processes
        given = (args, share, whole)[: len(inspect.signature(counted).parameters)]
        return counted(*given)[-1]
    in_epoch = max(len(share) // args.gradient_accumulation_steps, 1)
    return math.ceil(args.num_train_epochs * in_epoch)


def _balance(trainer: Any) -> dict[str, float]:
    """Return the coefficient of the routers' loss, which TRL takes from the model where the script gives none."""
    found = getattr(trainer, "router_aux_loss_coef", None)
    return {} if found is None else {"router_aux_loss_coef": found}


def _is_routed(config: Any) -> bool:
    """Whether the model has experts, whose routers give logits."""
    read = getattr(config, "get_text_config", None)  # not in transformers before 4.41
    return hasattr(config if read is None else read(), "output_router_logits")


def _looks_ahead(config: Any) -> bool:
    """Whether it is an encoder, which transformers also loads as a causal language model: BERT and its kind."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)


def _kind(config: Any) -> str:
    return getattr(config.peft_type, "value", config.peft_type)


def _adapted(base: Any, targets: Any) -> list[str]:
    """Return names that select the adapted modules: those given that have an adapter, or the full ones if a pattern was
    given."""
    adapted = sorted(name for name, module in base.named_modules() if hasattr(module, "lora_A"))
    if isinstance(targets, list):
        return sorted(name for name in targets if any(f".{one}".endswith(f".{name}") for one in adapted))
    return adapted
