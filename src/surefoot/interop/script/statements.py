"""Read statements about a script's objects outside their constructors: assigned attributes and method calls.

    args.learning_rate = 1e-5                         # as if learning_rate were in the call
    trainer.train(resume_from_checkpoint=True)
    model.gradient_checkpointing_enable()

Each becomes a setting, a note, or a fault if it changes the run in a way that surefoot does not support. An attribute
is read if it is assigned unconditionally before the trainer is created; otherwise its effect is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from surefoot.interop.script.literals import Findings
from surefoot.interop.translation import Outcome

_INTO_THE_CALL = "pass it to the call that creates the object"
_SEEDS = ("set_seed", "seed_everything", "manual_seed", "manual_seed_all", "random.seed")
_SETTERS = (
    "training",
    "evaluate",
    "testing",
    "save",
    "logging",
    "push_to_hub",
    "optimizer",
    "lr_scheduler",
    "dataloader",
)
_LISTED = "additional_special_tokens"
_MEANINGLESS = ("use_cache", "pretraining_tp", "pad_token_id", "bos_token_id", "eos_token_id")
_CALLBACK = "is code, which is not read: its effect is not known"
_FOLLOW = "is set where its effect cannot be followed"
_PAD = "padding is masked by position; tokenizer.pad sets its token"
_BEGIN: tuple[str, Outcome] = ("long texts are truncated at the start there, at the end here", "changed")
_END: tuple[str, Outcome] = ("long texts are truncated at the end, as here", "listed")
_LONGEST_TEXT = "data.max_length is the limit here"
_AFTERWARDS = {
    "save_model": "the run folder holds the model",
    "save_pretrained": "the run folder holds the model and its tokenizer",
    "push_to_hub": "is not part of the run: use surefoot train --push, or surefoot push",
    "merge_and_unload": "is not part of the run: use surefoot export --merge",
    "enable_input_require_grads": "gradients reach the adapter without it",
    "resize_token_embeddings": "surefoot adds the embedding rows of new tokens itself",
}
_LOST = {
    "load_adapter": "surefoot starts every run with a new adapter",
    "half": "precision.base sets the dtype of the weights",
}


@dataclass
class Statements:
    """Reads attributes and method calls.

    arguments, trainer, lora: the calls that create these objects.
    names: LoraConfig's setting -> row name.
    known: names of training settings.
    """

    found: Findings
    arguments: ast.Call
    trainer: ast.Call
    lora: ast.Call | None
    names: Mapping[str, str]
    known: Collection[str]

    def __post_init__(self) -> None:
        self.script = self.found.script

    def read(self) -> None:
        self._straight = {id(one) for scope in _scopes(self.script.tree) for one in scope.body}
        for node in ast.walk(self.script.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in _targets(node):
                    if isinstance(target, ast.Attribute):
                        self._stored(node, target)
            elif isinstance(node, ast.Call):
                self._called(node)

    def _stored(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, target: ast.Attribute) -> None:
        holder, name, shown = self.script.bound(target.value), target.attr, self.script.text(node)
        if name == "requires_grad":
            self._freezing(node, shown, node.value)
        elif holder is self.arguments or (self.lora is not None and holder is self.lora):
            self._setting(node, name if holder is self.arguments else self.names.get(name, name), shown)
        elif holder is self.trainer:
            self.found.fault(node, f"{shown}: changes the trainer after it is created")
        elif self._is_attribute(target.value, "config") and name not in _MEANINGLESS:
            self.found.fault(node, f"{shown}: changes the model")
        elif self._is_attribute(target.value, "config") or self._is_attribute(target.value, "generation_config"):
            self.found.note(node, shown, "does not affect training steps")
        elif name.startswith(("pad_token", "padding_side")):
            self.found.note(node, shown, _PAD)
        elif name == "truncation_side":
            begin = node.value is None or self.script.value(node.value) != "right"
            self.found.note(node, shown, *(_BEGIN if begin else _END))
        elif name == "model_max_length":
            self.found.note(node, shown, _LONGEST_TEXT, "changed")
        elif name == "chat_template":
            self.found.fault(node, f"{shown}: a custom template", "write it to a .jinja file, and set data.template")
        elif isinstance(holder, ast.Name) and holder.id != "self" and name in self.known:
            self.found.fault(node, f"{shown}: {_FOLLOW}", _INTO_THE_CALL)

    def _setting(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, name: str, shown: str) -> None:
        early = getattr(node, "end_lineno", 0) < self.trainer.lineno
        if isinstance(node, ast.AugAssign) or id(node) not in self._straight or not early:
            self.found.fault(node, f"{shown}: {_FOLLOW}", _INTO_THE_CALL)
        else:
            self.found.word(node, name, node.value, shown)

    def _called(self, node: ast.Call) -> None:
        callee = self.script.callee(node)
        name = callee.rpartition(".")[2] or getattr(node.func, "attr", "")
        given = {word.arg: word.value for word in node.keywords}
        shown = self.script.text(node)
        if name == "train" and isinstance(node.func, ast.Attribute) and self._is_trainer(node.func.value):
            requested = given.get("resume_from_checkpoint", node.args[0] if node.args else None)
            if requested is not None:
                self.found.word(node, "resume_from_checkpoint", requested, shown)
        elif name == "gradient_checkpointing_enable" or name == "prepare_model_for_kbit_training":
            requested = given.get("use_gradient_checkpointing", ast.Constant(True))
            self.found.word(node, "gradient_checkpointing", requested, shown)
        elif name == "gradient_checkpointing_disable":
            self.found.word(node, "gradient_checkpointing", ast.Constant(False), shown)
        elif callee == "torch.compile":
            self.found.word(node, "torch_compile", ast.Constant(True), shown)
            if "mode" in given:
                self.found.word(node, "torch_compile_mode", given["mode"], shown)
        elif callee.endswith(_SEEDS):
            self.found.note(node, shown, "the seed of the training arguments is the only seed here", "changed")
        elif name == "requires_grad_":
            self._freezing(node, shown, node.args[0] if node.args else ast.Constant(True))
        elif name in ("add_special_tokens", "add_tokens"):
            self._tokens(node, shown)
        elif name == "add_callback" and isinstance(node.func, ast.Attribute) and self._is_trainer(node.func.value):
            self.read_callbacks(node.args[0] if node.args else None)
        elif callee == "setattr" or (name.startswith("set_") and name[4:] in _SETTERS):
            holder = node.args[0] if callee == "setattr" and node.args else getattr(node.func, "value", None)
            if isinstance(holder, ast.expr) and self.script.bound(holder) in (self.arguments, self.lora):
                self.found.fault(node, f"{shown}: changes a setting by a call", _INTO_THE_CALL)
        elif callee == "PeftModel.from_pretrained":
            self.found.fault(node, f"{shown}: {_LOST['load_adapter']}", "merge it first: surefoot export --merge")
        elif name in _LOST and isinstance(node.func, ast.Attribute):
            self.found.fault(node, f"{shown}: {_LOST[name]}")
        elif name in _AFTERWARDS and isinstance(node.func, ast.Attribute):
            self.found.note(node, shown, _AFTERWARDS[name])

    def read_callbacks(self, node: ast.expr | None) -> None:
        """Read callbacks: EarlyStoppingCallback becomes settings, any other is noted as code."""
        for one in node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]:
            call = self.script.bound(one)
            shown = self.script.text(call)
            if not (isinstance(call, ast.Call) and self.script.callee(call).endswith("EarlyStoppingCallback")):
                self.found.note(one, f"callbacks={shown}", _CALLBACK, "changed")
                continue
            given = dict(zip(("early_stopping_patience", "early_stopping_threshold"), call.args, strict=False))
            given |= {word.arg: word.value for word in call.keywords if word.arg}
            self.found.word(
                one, "early_stopping_patience", given.get("early_stopping_patience", ast.Constant(1)), shown
            )
            if "early_stopping_threshold" in given:
                self.found.word(one, "early_stopping_threshold", given["early_stopping_threshold"], shown)

    def collator(self, node: ast.expr) -> str | None:
        """Return data.train_on as the collator implies; None for an unknown collator."""
        call = self.script.bound(node)
        name = self.script.callee(call).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        given = {word.arg for word in call.keywords} if isinstance(call, ast.Call) else set()
        if name == "DataCollatorForCompletionOnlyLM":
            return "responses" if "instruction_template" in given else "last"
        if name == "DataCollatorForLanguageModeling" and isinstance(call, ast.Call):
            masked = next((word.value for word in call.keywords if word.arg == "mlm"), None)
            if masked is None or self.script.value(masked) is not False:
                self.found.fault(
                    call,
                    f"{self.script.text(call)}: surefoot does not support masked language modeling",
                    "use mlm=False",
                )
            return "everything"
        return None

    def _tokens(self, node: ast.Call, shown: str) -> None:
        """Read `add_tokens([...])` and `add_special_tokens({...})` of PAD or of a list."""
        tokens = self.script.value(node.args[0]) if node.args else None
        given = tokens if isinstance(tokens, dict) else {_LISTED: tokens if isinstance(tokens, list) else [tokens]}
        added = given.get(_LISTED, [])
        if given.keys() - {"pad_token", _LISTED} or not all(isinstance(token, str) for token in added):
            self.found.fault(node, f"{shown}: surefoot adds PAD and a list of tokens", "write the list into the call")
            return
        if "pad_token" in given:
            self.found.word(node, "pad_token", ast.Constant("add"), shown)
        if added:
            before = [token for word in self.found.words if word.name == "added_tokens" for token in word.value]
            self.found.words = [word for word in self.found.words if word.name != "added_tokens"]
            every = ast.List([ast.Constant(token) for token in (*before, *added)])
            self.found.word(node, "added_tokens", every, shown)

    def _freezing(self, node: ast.AST, shown: str, value: ast.expr | None) -> None:
        frozen = value is not None and self.script.value(value) is False
        if frozen and self.lora is not None:
            self.found.note(node, shown, "with an adapter, the base is always frozen")
        else:
            self.found.fault(node, f"{shown}: selects which weights train", "use an adapter and its modules_to_save")

    def _is_trainer(self, node: ast.expr) -> bool:
        return self.script.bound(node) is self.trainer

    def _is_attribute(self, node: ast.expr, name: str) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == name


def _scopes(tree: ast.Module) -> Iterator[ast.Module | ast.FunctionDef]:
    yield tree
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]
