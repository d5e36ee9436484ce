"""Scripts around Hugging Face's Trainer or TRL's SFTTrainer: their literals in surefoot's words.

    surefoot translate simple_finetune.py

Read from the syntax tree are the calls of TrainingArguments or SFTConfig, LoraConfig, BitsAndBytesConfig,
from_pretrained, load_dataset and the trainer, and what is said of these objects elsewhere. Nothing is executed, so what
the script does besides (how its functions turn records into texts, above all) is not known, and said so.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.dialects import trainer, trl
from surefoot.dialects.draft import Dialect, Draft
from surefoot.dialects.launch import Command, Options, inherited
from surefoot.dialects.llamafactory.voice import trainer_row
from surefoot.dialects.rows import Row, carried, joint, listed, number, refused, text, whole
from surefoot.dialects.script.data import Found, trace
from surefoot.dialects.script.literals import Script, Unread
from surefoot.dialects.script.statements import Statements
from surefoot.dialects.tool import Tool
from surefoot.dialects.translation import Note, Translation
from surefoot.dialects.trl.data import set_examples
from surefoot.dialects.voice import Voice
from surefoot.dialects.words import Word
from surefoot.errors import Fault, InputError

NAME = "Hugging Face"
ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig")
TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer")
_LATER = ("DPOTrainer", "KTOTrainer", "RewardTrainer", "PPOTrainer", "GRPOTrainer", "ORPOTrainer", "RLOOTrainer")
_MACHINE = ("bf16", "fp16", "tf32", "use_cpu", "no_cuda", "dtype", "use_liger_kernel", "attn_implementation")
_PLANNED = "is decided at run time there; surefoot's plan decides it on this machine"
_CODE = "is code, which is not read"

_LORA = {
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
_QUANTISED = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "bnb_4bit_compute_dtype": "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
}
_LOADED = {
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
_OF_THE_TRAINER = {
    "tokenizer": "listed",
    "processing_class": "listed",
    "compute_metrics": "listed",
    "preprocess_logits_for_metrics": "listed",
    "formatting_func": "changed",
}
_OLD_TRL = ("max_seq_length", "max_length", "dataset_text_field", "packing", "neftune_noise_alpha")
_HANDLED = ("model", "args", "train_dataset", "eval_dataset", "peft_config", "model_init_kwargs")

_ROWS: tuple[Row, ...] = (
    joint("dtype", "auto", ("precision.base",), "the type in which weights are held", type=text),
    joint("lora_r", 8, ("adapter.rank",)),
    joint("lora_alpha", 8, ("adapter.alpha",), type=number),
    joint("lora_dropout", 0.0, ("adapter.dropout",)),
    joint("early_stopping_patience", None, ("early_stopping.patience",), type=whole),
    joint("early_stopping_threshold", 0.0, ("early_stopping.min_delta",), type=number),
    refused("lora_bias", "none", "surefoot trains no biases beside an adapter", "leave it out"),
    listed("lora_inference_mode", False, "a run trains"),
    refused("init_lora_weights", True, "surefoot begins LoRA as PEFT's default does", "leave it out"),
    listed("device_map", None, "training places no layers on several devices: the run is on one"),
    listed("low_cpu_mem_usage", None, "surefoot loads weights one by one"),
    listed("bnb_4bit_compute_dtype", None, "bf16 and fp16 of the training arguments decide the type of products"),
)
_PLAIN_TRAINER: tuple[Row, ...] = (
    *(row for row in trainer.ROWS if row.name in ("logging_steps", "gradient_checkpointing", "learning_rate", "bf16")),
    carried("max_length", None, "data.max_length", type=trl.ROWS["max_length"].type),
)


def claims_file(path: str, text: str) -> bool:
    return path.endswith(".py")


def claims_command(command: Command) -> bool:
    return command.program.endswith(".py")


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    if overrides:
        raise InputError(
            Fault(overrides[0], "a script takes no key=value", "change the script, or the config it becomes")
        )
    return _translate(Script.parse(text, path), options, Command(path, environment=inherited(options)))


def from_command(command: Command, options: Options) -> Translation:
    """A script with arguments of its own is another program for each of them: only one without can be read."""
    if command.arguments:
        what = "a script's own arguments cannot be followed through its code"
        raise InputError(Fault(" ".join(command.arguments), what, "write their values into the script"))
    return _translate(Script.parse(options.read(command.program), command.program), options, command)


def _translate(script: Script, options: Options, command: Command) -> Translation:
    reader = _Reader(script)
    reader.read()
    if reader.faults:
        raise InputError(reader.faults)
    own = {row.name: row for row in (*trl.ROWS.values(), *_ROWS, *(() if reader.is_trl else _PLAIN_TRAINER))}
    if reader.named_by_trainer:
        own["dtype"] = trl.ROWS["dtype"]  # SFTTrainer loads a model in fp32, from_pretrained as it was saved
    rules = (_data_rule(reader), trl.set_model, trl.set_adapter, _precision_rule(reader), *_SHARED, *trainer.RULES)
    draft = Draft(
        Dialect(NAME, own, rules, trl.ALIASES),
        reader.words,
        allow_unknown=options.allow_unknown,
        environment=command.environment,
        facts=command.facts,
    )
    found = draft.finish("train", environment=draft.environment)
    return replace(found, notes=(*found.notes, *reader.notes))


_SHARED = (trainer.set_checkpointing, trainer.set_do_train)


class _Reader:
    """Collects the words of all calls that matter."""

    def __init__(self, script: Script):
        self.script = script
        self.words: list[Word] = []
        self.notes: list[Note] = []
        self.faults: list[Fault] = []
        self.train: Found | None = None
        self.evaluation: Found | None = None
        self.learned: str | None = None  # by the collator, as data.train_on says it
        self.is_trl = self.named_by_trainer = False
        self.undecided: set[str] = set()

    def read(self) -> None:
        calls = [node for node in ast.walk(self.script.tree) if isinstance(node, ast.Call)]
        named = [(self.script.callee(call), call) for call in calls]
        lasts = {name.rpartition(".")[2]: call for name, call in named}
        if later := next((name for name in _LATER if name in lasts), None):
            where = self.script.where(lasts[later])
            raise InputError(Fault(where, f"{later} comes with a later version", "surefoot trains on answers now"))
        arguments = [call for name, call in named if name.rpartition(".")[2] in ARGUMENTS]
        trainers = [call for name, call in named if name.rpartition(".")[2] in TRAINERS]
        for found, kind in ((arguments, " or ".join(ARGUMENTS[::2])), (trainers, "Trainer or SFTTrainer")):
            if len(found) != 1:
                where = self.script.where(found[1]) if found else self.script.path
                raise InputError(Fault(where, f"has {len(found)} calls of {kind}", "surefoot reads a script with one"))
        self.is_trl = "SFTTrainer" in lasts or "SFTConfig" in lasts
        self._keywords(arguments[0], None)
        if "LoraConfig" in lasts:
            where = self.script.where(lasts["LoraConfig"])
            self.words.append(Word("use_peft", True, where, "LoraConfig(…)"))
            self._keywords(lasts["LoraConfig"], _LORA)
        if "BitsAndBytesConfig" in lasts:
            self._keywords(lasts["BitsAndBytesConfig"], _QUANTISED)
        self._models(named, trainers[0])
        self.statements = Statements(
            self.script, arguments[0], trainers[0], lasts.get("LoraConfig"), _LORA, trl.ROWS.keys()
        )
        self._trainer(trainers[0])
        self.statements.read()
        self.words += self.statements.words
        self.notes += self.statements.notes
        self.faults += self.statements.faults
        self._token_lengths(named)

    def _keywords(self, call: ast.Call, names: Mapping[str, str] | None) -> None:
        """names: what their words are called in the rows; None: as they are."""
        if call.args:
            where = self.script.where(call.args[0])
            if names is None:
                self._word("output_dir", call.args[0])
            else:
                self.faults.append(Fault(where, "a setting without a name", "write it as name=value"))
        for word in call.keywords:
            if word.arg is None:
                self._expanded(word.value, names)
            elif names is not None and word.arg not in names:
                what = f"{word.arg}: surefoot has no such setting"
                self.faults.append(Fault(self.script.where(word.value), what, "leave it out"))
            else:
                self._word(names[word.arg] if names else word.arg, word.value, word.arg)

    def _expanded(self, node: ast.expr, names: Mapping[str, str] | None) -> None:
        held = self.script.value(node)
        if not isinstance(held, dict):
            self.faults.append(
                Fault(self.script.where(node), f"**{self.script.text(node)} is no literal", "write it out")
            )
            return
        for name, value in held.items():
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
                Fault(unread.where, f"{written}: {unread} is no literal", "write its value into the script")
            )

    def _models(self, named: Sequence[tuple[str, ast.Call]], trained: ast.Call) -> None:
        loads = [call for name, call in named if name.endswith("ForCausalLM.from_pretrained")]
        given = next((word.value for word in trained.keywords if word.arg == "model"), None)
        given = trained.args[0] if given is None and trained.args else given
        if given is not None and isinstance(held := self.script.value(given), str):
            self._add("model_name_or_path", held, self.script.where(given), "model")
            self.named_by_trainer = True
            return
        if not loads:
            what = "no AutoModelForCausalLM.from_pretrained: what is trained is not known"
            self.faults.append(Fault(self.script.path, what, "surefoot reads scripts that load a model by name"))
            return
        call = self._of_the_trainer(loads, given)
        path = call.args[0] if call.args else None
        for word in call.keywords:
            if word.arg == "pretrained_model_name_or_path":
                path = word.value
            elif word.arg == "quantization_config":
                continue
            elif word.arg in _LOADED:
                self._word(_LOADED[word.arg], word.value, word.arg)
            else:
                where = self.script.where(word.value)
                self.faults.append(Fault(where, f"from_pretrained: surefoot has no {word.arg}", "leave it out"))
        if path is not None:
            self._word("model_name_or_path", path, "from_pretrained")

    def _of_the_trainer(self, loads: Sequence[ast.Call], given: ast.expr | None) -> ast.Call:
        """The load that the trainer's model comes from; the first where that cannot be followed."""
        node = None if given is None else self.script.bound(given)
        while isinstance(node, ast.Call) and node not in loads and node.args:  # get_peft_model(model, …)
            node = self.script.bound(node.args[0])
        return next((call for call in loads if call is node), loads[0])

    def _trainer(self, call: ast.Call) -> None:
        for word in call.keywords:
            name, where = word.arg or "**", self.script.where(word.value)
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
                for one in found.code:
                    self.notes.append(Note(one, "listed", (), f"{_CODE}: look at `surefoot data`", found.where))
            elif name == "callbacks":
                self.statements.read_callbacks(self.script.bound(word.value))
            elif name == "data_collator":
                self.learned = self.statements.collator(word.value)
                fate = "changed" if self.learned is None else "carried"
                self.notes.append(
                    Note(f"{name}=…", fate, ("data.train_on",), _why(name) if fate == "changed" else "", where)
                )
            elif name in _OF_THE_TRAINER:
                fate: Any = _OF_THE_TRAINER[name]
                self.notes.append(Note(f"{name}=…", fate, (), _why(name), where))
            elif name in _OLD_TRL:
                self._word(name, word.value)
            elif name not in _HANDLED:
                self.faults.append(Fault(where, f"{name}: surefoot has no such setting of a trainer", "leave it out"))
        if self.train is None and not self.faults:
            self.faults.append(Fault(self.script.where(call), "names no train_dataset", "add it"))

    def _token_lengths(self, named: Sequence[tuple[str, ast.Call]]) -> None:
        """`tokenizer(text, max_length=512)` of a plain Trainer's preparation."""
        if self.is_trl:
            return
        lengths = {}
        for name, call in named:
            if name.rpartition(".")[2] in ("tokenizer", "tok", "encode", "encode_plus"):
                lengths |= {
                    self.script.where(word.value): word.value for word in call.keywords if word.arg == "max_length"
                }
        if lengths:
            self._word("max_length", next(iter(lengths.values())))


def _why(name: str) -> str:
    if name in ("tokenizer", "processing_class"):
        return "the tokenizer that belongs to the model"
    if name == "formatting_func":
        return f"{_CODE}: data.template decides how records become texts"
    if name == "data_collator":
        return f"{_CODE}: data.train_on decides what is learned"
    return _CODE


def _first_unread(value: Any) -> Unread | None:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((item for item in items if isinstance(item, Unread)), None)


def _data_rule(reader: _Reader) -> Any:
    def rule(draft: Draft) -> None:
        assert reader.train is not None
        draft.set("data.train", _short(_trained(reader.train.source)), why=f"load_dataset at {reader.train.where}")
        held = reader.evaluation
        if held is not None and held.share is not None and held.is_test:
            draft.set("data.eval", held.share, why=f"train_test_split at {held.where}")
        elif held is not None:
            draft.set("data.eval", _short(held.source), why=f"load_dataset at {held.where}")
        draft.set("stage", "sft")
        if reader.learned not in (None, "everything"):
            draft.set("data.train_on", reader.learned, why="what DataCollatorForCompletionOnlyLM leaves of the labels")
        elif not reader.is_trl:
            collator = "what a causal collator's labels are; data.train_on=responses masks the prompts"
            draft.set("data.train_on", "everything", why=collator)
        _set_stopping(draft)
        if not reader.is_trl:
            return
        learned = reader.learned
        set_examples(draft, None)
        if learned not in (None, "everything"):
            draft.set("data.train_on", learned, why="what DataCollatorForCompletionOnlyLM leaves of the labels")
        draft.note("dataset_text_field", "listed", "data.format recognises the records' layout")
        draft.drop("the script names its data itself", *_TRL_DATA)

    return rule


def _set_stopping(draft: Draft) -> None:
    names = ("early_stopping_patience", "early_stopping_threshold")
    if draft[names[0]] is None:
        return
    if draft.has("data.eval") is None:
        draft.refuse(names[0], "there is nothing to evaluate on", "name an eval_dataset")
        return
    draft.set("early_stopping.patience", draft[names[0]], names[0])
    draft.set("early_stopping.min_delta", draft[names[1]], names[1])


_TRL_DATA = (
    "dataset_name",
    "datasets",
    "dataset_train_split",
    "dataset_test_split",
    "test_split_size",
    "dataset_config",
)


def _precision_rule(reader: _Reader) -> Any:
    def rule(draft: Draft) -> None:
        if reader.undecided & {"bf16", "fp16"} and not (draft.given("bf16") and draft["bf16"]):
            draft.drop("asks for nothing", *(name for name in ("bf16", "fp16") if not draft[name]))
            if draft["fp16"]:
                draft.set("precision.compute", "fp16", "fp16")
        elif reader.is_trl:
            trl.set_compute(draft)
        else:
            trainer.set_precision(draft)
        trl.set_weights(draft)

    return rule


def _trained(source: dict[str, Any]) -> dict[str, Any]:
    """Without the split that is meant unless another is named; evaluation data keep theirs."""
    return {key: value for key, value in source.items() if (key, value) != ("split", "train")}


def _short(source: dict[str, Any]) -> Any:
    return source["path"] if source.keys() == {"path"} else source


SCRIPT = Tool(
    NAME, claims_command, from_command, claims_file, from_file, voice=lambda translation: Voice(row=trainer_row)
)
