"""Collect the settings in a script's calls, under the names of TRL's rows, each with its place."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.interop import trainer, trl
from surefoot.interop.faults import script_error, script_fault
from surefoot.interop.script.data import Found, trace
from surefoot.interop.script.literals import Findings, Script, Unread
from surefoot.interop.script.machine import KERNELS, read_machine
from surefoot.interop.script.statements import Statements
from surefoot.interop.settings import Row, carried, first_values, joint, listed, names, number, refused, text, whole
from surefoot.interop.translation import Note, Outcome
from surefoot.interop.words import Word
from surefoot.system.errors import InputError

LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "task_type": "lora_task_type",
    "bias": "lora_bias",
    "inference_mode": "lora_inference_mode",
    "init_lora_weights": "init_lora_weights",
}
QUANTIZED = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_compute_dtype": "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
}
LOADED = {
    "revision": "model_revision",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "device_map": "device_map",
    "trust_remote_code": "trust_remote_code",
    "use_cache": "use_cache",
    "low_cpu_mem_usage": "low_cpu_mem_usage",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
}
OF_THE_TRAINER = ("tokenizer", "processing_class", "compute_metrics", "preprocess_logits_for_metrics")
OLD_TRL = ("max_seq_length", "max_length", "dataset_text_field", "packing", "neftune_noise_alpha")
HANDLED = ("model", "args", "train_dataset", "eval_dataset", "peft_config", "model_init_kwargs")
_END: tuple[Outcome, str] = ("listed", "long texts are truncated at the end, as here (data.encoding: whole)")
_UNCUT: tuple[Outcome, str] = ("changed", "texts are not truncated there; here data.max_length applies")
_PADDED: tuple[Outcome, str] = ("listed", "padding is masked by position and does not affect results")
_START: tuple[Outcome, str] = ("changed", "long texts are truncated at the start there, at the end here")
_WORDS: tuple[Outcome, str] = ("changed", "surefoot uses the tokenizer as configured in its files")
TOKENIZING: Mapping[str, Mapping[str | bool | None, tuple[Outcome, str]]] = {
    "truncation": {None: _END, False: _UNCUT, "do_not_truncate": _UNCUT},
    "truncation_side": {None: _START, "right": _END},
    "padding": {None: _PADDED},
    "padding_side": {None: _PADDED},
    "pad_to_multiple_of": {None: _PADDED},
    "add_special_tokens": {None: _WORDS, True: ("listed", "BOS and EOS follow the tokenizer's files")},
    **{name: {None: _WORDS} for name in ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")},
}
"""Arguments of loading or calling a tokenizer -> {value, or None for any other: (outcome, reason)}."""

ROWS: tuple[Row, ...] = (
    joint("dtype", "auto", ("precision.base",), "dtype of the weights", type=text),
    joint("lora_r", 8, ("adapter.rank",)),
    joint("lora_alpha", 8, ("adapter.alpha",), type=number),
    joint("lora_dropout", 0.0, ("adapter.dropout",)),
    joint("early_stopping_patience", None, ("early_stopping.patience",), type=whole),
    joint("early_stopping_threshold", 0.0, ("early_stopping.min_delta",), type=number),
    refused("lora_bias", "none", "surefoot trains no biases with an adapter"),
    listed("lora_inference_mode", False, "a run always trains"),
    joint("init_lora_weights", True, ("adapter.start",), "True, pissa, pissa_niter_N or olora", type=first_values),
    *(joint(f"enable_{kernel}_sdp", None, (f"attention.{kernel}",)) for kernel in KERNELS),
    joint("added_tokens", None, ("tokenizer.add",), "add_tokens, and add_special_tokens of a list", type=names),
    listed("device_map", None, "training runs on one device"),
    listed("low_cpu_mem_usage", None, "weights are loaded one at a time"),
    listed("bnb_4bit_compute_dtype", None, "bf16 and fp16 of the training arguments decide the dtype of products"),
)
PLAIN_TRAINER: tuple[Row, ...] = (
    *(row for row in trainer.ROWS if row.name in ("logging_steps", "gradient_checkpointing", "learning_rate", "bf16")),
    carried("max_length", None, "data.max_length", type=trl.ROWS["max_length"].type),
)


ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")
_LATER = ("DPOTrainer", "KTOTrainer", "RewardTrainer", "PPOTrainer", "GRPOTrainer", "ORPOTrainer", "RLOOTrainer")
_MACHINE = ("bf16", "fp16", "tf32", "use_cpu", "no_cuda", "dtype", "use_liger_kernel", "attn_implementation")
_PLANNED = "is decided at run time in the script; here surefoot's plan decides it"
_CODE = "is code, which is not read"
_SEES = re.compile(r"(Processor|ForImageTextToText|ForVision2Seq|ForMultimodalLM|VLFor\w+)\.from_pretrained$")


class Reader(Findings):
    """Collects the settings of a script's calls."""

    def __init__(self, script: Script):
        super().__init__(script)
        self.train: Found | None = None
        self.evaluation: Found | None = None
        self.formatting: ast.expr | None = None  # the trainer's formatting_func
        self.learned: str | None = None  # data.train_on, as the collator implies
        self.is_trl = self.named_by_trainer = False
        self.undecided: set[str] = set()

    def read(self) -> None:
        calls = [node for node in ast.walk(self.script.tree) if isinstance(node, ast.Call)]
        named = [(self.script.callee(call), call) for call in calls]
        lasts = {name.rpartition(".")[2]: call for name, call in named}
        if later := next((name for name in _LATER if name in lasts), None):
            where = self.script.where(lasts[later])
            what = f"scripts with {later} are not supported"
            fix = "give its arguments to `trl dpo`, `trl kto` or `trl reward`, or write a config of that stage"
            raise script_error(where, what, fix)
        if sees := next(((name, call) for name, call in named if _SEES.search(name)), None):
            what = f"{sees[0]}: trains with images or audio, which this translation does not support"
            raise script_error(self.script.where(sees[1]), what, "use a text model and its tokenizer")
        arguments = [call for name, call in named if name.rpartition(".")[2] in ARGUMENTS]
        trainers = [call for name, call in named if name.rpartition(".")[2] in TRAINERS]
        if not trainers and (runs := _other_launcher(self.script)) is not None:
            raise script_error(self.script.path, *runs)
        for found, kind in ((arguments, " or ".join(ARGUMENTS[::2])), (trainers, "Trainer or SFTTrainer")):
            if len(found) != 1:
                where = self.script.where(found[1]) if found else self.script.path
                raise script_error(
                    where, f"has {len(found)} calls of {kind}", "surefoot reads scripts with exactly one"
                )
        self.is_trl = "SFTTrainer" in lasts or "SFTConfig" in lasts
        self._keywords(arguments[0], None)
        if "LoraConfig" in lasts:
            where = self.script.where(lasts["LoraConfig"])
            self.words.append(Word("use_peft", True, where, "LoraConfig(…)"))
            self._keywords(lasts["LoraConfig"], LORA)
        if "BitsAndBytesConfig" in lasts:
            self._keywords(lasts["BitsAndBytesConfig"], QUANTIZED)
        self._models(named, trainers[0])
        self.statements = Statements(self, arguments[0], trainers[0], lasts.get("LoraConfig"), LORA, trl.ROWS.keys())
        self._trainer(trainers[0])
        self.statements.read()
        self.machine = read_machine(self, trainers[0])
        self._tokenizing(named)

    def _keywords(self, call: ast.Call, names: Mapping[str, str] | None) -> None:
        """Collect the keywords of a call. names: keyword -> row name; None if they are the same."""
        if call.args:
            if names is None:
                self._word("output_dir", call.args[0])
            else:
                self.fault(call.args[0], "a positional argument", "write it as name=value")
        for word in call.keywords:
            if word.arg is None:
                self._expanded(word.value, names)
            elif names is not None and word.arg not in names:
                self.fault(word.value, f"{word.arg}: surefoot has no such setting")
            else:
                self._word(names[word.arg] if names else word.arg, word.value, word.arg)

    def _expanded(self, node: ast.expr, names: Mapping[str, str] | None) -> None:
        keywords = self.script.value(node)
        if not isinstance(keywords, dict):
            self.fault(node, f"**{self.script.text(node)} is not a literal", "write it out")
            return
        for name, value in keywords.items():
            self._add(names.get(name, name) if names else name, value, self.script.where(node), str(name))

    def _word(self, name: str, node: ast.expr, written: str | None = None) -> None:
        self._add(name, self.script.value(node), self.script.where(node), written or name)

    def _add(self, name: str, value: Any, where: str, written: str) -> None:
        unread = value if isinstance(value, Unread) else _first_unread(value)
        if unread is None:
            shown = f"{written}={value!r}"
            self.words.append(Word(name, value, where, shown))
        elif trl.ALIASES.get(name, name) in _MACHINE:
            self.undecided.add(trl.ALIASES.get(name, name))
            self.notes.append(Note(f"{written}={unread}", "changed", (), _PLANNED, where))
        else:
            self.faults.append(
                script_fault(unread.where, f"{written}: {unread} is not a literal", "write its value into the script")
            )

    def _models(self, named: Sequence[tuple[str, ast.Call]], trained: ast.Call) -> None:
        loads = [call for name, call in named if name.endswith("ForCausalLM.from_pretrained")]
        given = next((word.value for word in trained.keywords if word.arg == "model"), None)
        given = trained.args[0] if given is None and trained.args else given
        if given is not None and isinstance(path := self.script.value(given), str):
            self._add("model_name_or_path", path, self.script.where(given), "model")
            self.named_by_trainer = True
            return
        if not loads:
            what = "no AutoModelForCausalLM.from_pretrained: the model is not known"
            self.faults.append(script_fault(self.script.path, what, "surefoot reads scripts that load a model by name"))
            return
        call = self._of_the_trainer(loads, given)
        path = call.args[0] if call.args else None
        for word in call.keywords:
            if word.arg == "pretrained_model_name_or_path":
                path = word.value
            elif word.arg == "quantization_config":
                continue
            elif word.arg in LOADED:
                self._word(LOADED[word.arg], word.value, word.arg)
            else:
                self.fault(word.value, f"from_pretrained: surefoot has no {word.arg}")
        if path is not None:
            self._word("model_name_or_path", path, "from_pretrained")

    def _of_the_trainer(self, loads: Sequence[ast.Call], given: ast.expr | None) -> ast.Call:
        """Return the load of the trainer's model; the first load if that cannot be followed."""
        node = None if given is None else self.script.bound(given)
        followed: list[ast.expr] = []  # model = get_peft_model(model, …) may refer to itself
        while isinstance(node, ast.Call) and node not in loads and node.args and node not in followed:
            followed.append(node)
            node = self.script.bound(node.args[0])
        return next((call for call in loads if call is node), loads[0])

    def _trainer(self, call: ast.Call) -> None:
        for word in call.keywords:
            name = word.arg or "**"
            if name in ("train_dataset", "eval_dataset"):
                if self.script.text(word.value) == "None":
                    continue
                try:
                    found = trace(self.script, word.value)
                except InputError as error:
                    self.faults += error.faults
                    continue
                if name == "train_dataset":
                    self.train = found
                else:
                    self.evaluation = found
            elif name == "callbacks":
                self.statements.read_callbacks(self.script.bound(word.value))
            elif name == "data_collator":
                self.learned = self.statements.collator(word.value)
                known = ("", "carried") if self.learned else (_why(name), "changed")
                self.note(word.value, f"{name}=…", *known, "data.train_on")
            elif name == "formatting_func":
                self.formatting = word.value
            elif name in OF_THE_TRAINER:
                self.note(word.value, f"{name}=…", _why(name))
            elif name in OLD_TRL:
                self._word(name, word.value)
            elif name not in HANDLED:
                self.fault(word.value, f"{name}: surefoot has no such setting of a trainer")
        if self.train is None and not self.faults:
            self.fault(call, "has no train_dataset", "add it")

    def _tokenizing(self, named: Sequence[tuple[str, ast.Call]]) -> None:
        """Collect arguments of `tokenizer(text, truncation=True, max_length=512)` and of loading the tokenizer."""
        lengths: list[ast.expr] = []
        for name, call in named:
            last = name.rpartition(".")[2]
            loads = last == "from_pretrained" and "Tokenizer" in name
            if not loads and last not in ("tokenizer", "tok", "encode", "encode_plus"):
                continue
            for word in call.keywords:
                if word.arg == ("model_max_length" if loads else "max_length"):
                    lengths.append(word.value)
                elif word.arg in TOKENIZING:
                    self._tokenizing_word(word)
        if lengths and not self.is_trl:
            self._word("max_length", next(iter(lengths)))
        elif lengths:
            shown = f"max_length={self.script.text(lengths[0])}"
            self.note(lengths[0], shown, "max_length of SFTConfig decides", "changed")

    def _tokenizing_word(self, word: ast.keyword) -> None:
        outcomes = TOKENIZING[str(word.arg)]
        value, shown = self.script.value(word.value), f"{word.arg}={self.script.text(word.value)}"
        outcome, why = outcomes.get(value, outcomes[None]) if isinstance(value, str | bool) else outcomes[None]
        self.note(word.value, shown, why, outcome)


def _other_launcher(script: Script) -> tuple[str, str] | None:
    """Return (what, fix) if a script without a trainer starts surefoot or LLaMA-Factory."""
    nodes = [node for node in ast.walk(script.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = [str(node.value) for node in nodes]
    modules = {name.partition(".")[0] for name in script.imports.values()}
    if "surefoot" in modules:
        return "already runs surefoot", f"start it directly: python {script.path}"
    if "llamafactory" in modules or any("llamafactory-cli" in text for text in texts):
        config = next((text for text in texts if text.endswith((".yaml", ".yml"))), "CONFIG.yaml")
        return "starts LLaMA-Factory with a config", f"surefoot run -- llamafactory-cli train {config}"
    return None


def _why(name: str) -> str:
    if name in ("tokenizer", "processing_class"):
        return "surefoot loads the model's tokenizer"
    if name == "data_collator":
        return f"{_CODE}: data.train_on decides which tokens carry loss"
    return _CODE


def _first_unread(value: Any) -> Unread | None:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((item for item in items if isinstance(item, Unread)), None)
