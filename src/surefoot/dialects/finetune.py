"""The flags of `finetune.py` from LLM-Adapters and NVlabs/DoRA, and of the variant in the bf16 migration guide.

    finetune.py --base_model meta-llama/Llama-3.1-8B --adapter_name dora --lora_r=32 --bf16=True

The guide's defaults hold: eager attention, cuDNN's kernel off, no torch.compile, weights in fp32, a PAD of its own. The
original's other defaults are named beside them. Python Fire read the flags: `--flag` is true, `--flag=True` and
`--flag True` say the same, and a list comes as a literal; the guide writes lists with blanks, which Fire takes for
something else, so lists are read in every spelling.

Facts: LLM-Adapters 8166572, NVlabs/DoRA 7e2f10a (arguments and defaults only).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.dialects.arithmetic import counted, switch
from surefoot.dialects.draft import Dialect, Draft
from surefoot.dialects.launch import Command, Options, inherited
from surefoot.dialects.llamafactory.voice import trainer_row
from surefoot.dialects.modules import module_names, set_default_targets
from surefoot.dialects.resuming import resume_argument
from surefoot.dialects.rows import Refusal, Row, carried, joint, listed, number, refused, text
from surefoot.dialects.tool import Tool
from surefoot.dialects.trainer import set_precision
from surefoot.dialects.translation import Translation
from surefoot.dialects.voice import Lines, RunFacts, Voice
from surefoot.dialects.words import Word, read_flags
from surefoot.errors import Fault, InputError

TOOL = "finetune.py"
LISTS = ("target_modules", "lora_target_modules", "Wdecompose_target_modules")
WARMUP, ORIGINAL_WARMUP = 300, 100  # steps, fixed in the scripts
LOGGING, ORIGINAL_LOGGING = 50, 10
KEEP = 3
MICRO = ("per_device_train_batch_size", "micro_batch_size")

_BOTTLENECK = "is about bottleneck adapters, which surefoot does not have, and has no effect on LoRA or DoRA"
_WANDB = "what is logged is decided by report_to"


def _share_or_count(value: Any) -> int | float:
    held = number(value)
    if held < 0 or (held >= 1 and held != int(held)):
        raise ValueError("a count of examples, or a share below 1")
    return int(held) if held >= 1 or held == 0 else float(held)


def _attention(value: Any) -> str:
    if value not in ("eager", "sdpa", "flash_attention_2"):
        raise Refusal(f"{value} is no attention that surefoot has", "use eager, sdpa or flash_attention_2")
    return value


def _adapter(value: Any) -> str:
    name = str(value).lower()
    if name in ("bottleneck", "prefix-tuning"):
        raise Refusal(f"{name} adapters are not in surefoot", "use lora or dora")
    if name not in ("lora", "dora", "rslora"):
        raise Refusal(f"{value} is no adapter that finetune.py has", "use lora, dora or rslora")
    return "lora" if name == "rslora" else name


def _none(value: Any) -> Any:
    return None if value in ("None", "") else value


_ROWS = (
    carried("base_model", None, "model.path", type=text),
    carried("data_path", "yahma/alpaca-cleaned", "data.train", type=text),
    carried("output_dir", "./output", "output", type=text),
    carried("adapter_name", "lora", "adapter.kind", _adapter, type=text),
    refused(
        "load_8bit",
        False,
        "a base in 8 bits is not in surefoot",
        "leave it out; for 4 bits, write the config (surefoot translate --out FILE), and train FILE precision.base=nf4",
    ),
    joint("batch_size", 128, ("batch.size",), "examples of an optimizer step, over all micro-batches"),
    joint("micro_batch_size", 4, ("batch.micro",), "the original's name"),
    joint("per_device_train_batch_size", 4, ("batch.micro",), "the guide's name"),
    joint("num_epochs", 3, ("duration",), type=number),
    carried("learning_rate", 3e-4, "optim.lr"),
    carried("weight_decay", 0.01, "optim.weight_decay"),
    carried("cutoff_len", 256, "data.max_length"),
    joint("val_set_size", 2000, ("data.eval",), "split off by the seed; 0 evaluates nothing", type=_share_or_count),
    joint(
        "use_gradient_checkpointing", False, ("gradient_checkpointing",), "the original ignored it without load_8bit"
    ),
    joint("eval_step", 200, ("eval_every",)),
    joint("save_step", 200, ("checkpoint.every",)),
    carried("lora_r", 8, "adapter.rank"),
    carried("lora_alpha", 16, "adapter.alpha", type=number),
    carried("lora_dropout", 0.05, "adapter.dropout"),
    refused("init_lora_weights", True, "surefoot begins LoRA as PEFT's default does", "leave it out"),
    listed("lora_target_modules", None, "the original prints it and never uses it: target_modules decides"),
    joint("target_modules", None, ("adapter.targets",), type=module_names),
    listed("bottleneck_size", 256, _BOTTLENECK),
    listed("non_linearity", "tanh", _BOTTLENECK),
    listed("adapter_dropout", 0.0, _BOTTLENECK),
    listed("use_parallel_adapter", False, _BOTTLENECK),
    listed("use_adapterp", False, _BOTTLENECK),
    listed("scaling", 1.0, _BOTTLENECK),
    listed("num_virtual_tokens", 30, "is about prefix tuning, and has no effect on LoRA or DoRA"),
    refused(
        "dora_simple",
        True,
        "surefoot's DoRA takes the norm as a constant in the backward pass, as dora_simple does",
        "leave it out",
    ),
    refused(
        "Wdecompose_target_modules",
        None,
        "modules that train their magnitude alone are not in surefoot",
        "leave it out, or name them in target_modules",
        same=("None", ""),
    ),
    joint("train_on_inputs", False, ("data.train_on",), "the original's default is True"),
    listed("group_by_length", False, "which examples a step has is drawn by the seed alone"),
    joint("wandb_project", "", ("report_to", "tracking.project"), type=text),
    joint("wandb_run_name", "", ("tracking.name",), type=text),
    joint("wandb_online", True, ("tracking.offline",)),
    listed("wandb_watch", "", _WANDB),
    listed("wandb_log_model", "", _WANDB),
    joint("resume_from_checkpoint", None, (), "becomes --resume", type=_none),
    carried("seed", 42, "seed"),
    joint("bf16", False, ("precision.compute",)),
    joint("fp16", False, ("precision.compute",)),
    listed("timestamp", "", "names a folder there; here output is the run folder"),
    carried("attn_implementation", "eager", "attention.implementation", _attention, type=text),
    joint("disable_cudnn_sdpa", True, ("attention.cudnn",), "the guide's default; its code said False"),
    joint("disable_flash_sdpa", False, ("attention.flash",)),
    joint("enable_torch_compile", False, ("compile",), "the original's call came too late to have an effect"),
)
ROWS: Mapping[str, Row] = {row.name: row for row in _ROWS}
SWITCHES = tuple(name for name, row in ROWS.items() if isinstance(row.default, bool))


def _fixed(draft: Draft) -> None:
    draft.set("stage", "sft")
    fork = "what both scripts used"
    draft.set(
        "data.template",
        "commonsense",
        why="LLM-Adapters' prompts, byte for byte; the guide's code had another, "
        "which is data.template=commonsense-sentence",
    )
    draft.set(
        "optim.warmup", counted(WARMUP, "step"), why=f"fixed in the guide's code; the original's is {ORIGINAL_WARMUP}"
    )
    draft.set("optim.warmup_from_zero", True, why="a warm-up of transformers")
    draft.set("log_every", LOGGING, why=f"fixed in the guide's code; the original's is {ORIGINAL_LOGGING}")
    draft.set("checkpoint.keep", KEEP, why=fork)
    draft.set("precision.base", "fp32", why="the guide loads weights in fp32")


def _attention_kernels(draft: Draft) -> None:
    for name, key in (("disable_cudnn_sdpa", "cudnn"), ("disable_flash_sdpa", "flash")):
        allowed = "allowed, and taken only where it passes the accuracy check"
        draft.set(f"attention.{key}", "off" if draft[name] else "auto", name, why="" if draft[name] else allowed)
    draft.set("compile", "default" if draft["enable_torch_compile"] else "off", "enable_torch_compile")


def _batch(draft: Draft) -> None:
    names = MICRO
    given = [name for name in MICRO if draft.given(name)]
    if len(given) == 2 and draft[names[0]] != draft[names[1]]:
        draft.refuse(names[1], f"{names[0]} says {draft[names[0]]}", "give one of them")
        return
    micro = given[0] if given else names[0]
    for name in ("batch_size", micro):
        if draft[name] < 1:
            draft.refuse(name, f"expected a number from 1, got {draft[name]}")
            return
    size, examples = draft["batch_size"], draft[micro]
    if examples > size:
        what = f"is {examples}, and batch_size, the examples of a whole step, is {size}"
        draft.refuse(micro, what, f"use at most {size}")
        return
    short = (
        size % examples and f"exactly {size} examples, where the original silently took {size // examples * examples}"
    )
    draft.set("batch.size", size, "batch_size", why=short or "")
    draft.set("batch.micro", examples, *(given or [micro]))


def _lengths(draft: Draft) -> None:
    epochs = draft["num_epochs"]
    if epochs <= 0:
        draft.refuse("num_epochs", f"expected a number above 0, got {epochs:g}")
    else:
        draft.set("duration", counted(epochs, "epoch"), "num_epochs")
    for name in ("eval_step", "save_step"):
        if draft[name] < 1:
            draft.refuse(name, f"expected a number of steps from 1, got {draft[name]}")
            return
    if held := draft["val_set_size"]:
        draft.set("data.eval", held, "val_set_size")
        draft.set("eval_every", counted(draft["eval_step"], "step"), "eval_step")
    else:
        draft.set("data.eval", "none", "val_set_size")
        draft.drop("nothing is evaluated", "eval_step")
    draft.set("checkpoint.every", counted(draft["save_step"], "step"), "save_step")


def _adapter_rest(draft: Draft) -> None:
    if str(draft["adapter_name"]).lower() == "rslora":
        draft.set("adapter.rslora", True, "adapter_name")
    if names := draft["target_modules"]:
        draft.set("adapter.targets", names, "target_modules")
    else:
        set_default_targets(draft, "target_modules")
    if draft.given("use_gradient_checkpointing"):
        value = switch(draft["use_gradient_checkpointing"])
        draft.set("gradient_checkpointing", value, "use_gradient_checkpointing")


def _data(draft: Draft) -> None:
    draft.set("data.train_on", "everything" if draft["train_on_inputs"] else "responses", "train_on_inputs")


def _tracking(draft: Draft) -> None:
    of_the_environment = draft.environment.get("WANDB_PROJECT", "")
    project = draft["wandb_project"] or of_the_environment  # the original looked there too
    if not project:
        draft.drop("no W&B project is named, so nothing is sent", "wandb_project", "wandb_run_name", "wandb_online")
        return
    why = "" if draft["wandb_project"] else "WANDB_PROJECT"
    draft.set("report_to", ["wandb"], "wandb_project", why=why)
    draft.set("tracking.project", project, "wandb_project", why=why)
    if draft["wandb_run_name"]:
        draft.set("tracking.name", draft["wandb_run_name"], "wandb_run_name")
    else:
        draft.drop("is empty", "wandb_run_name")
    offline = not draft["wandb_online"] or draft.environment.get("WANDB_MODE") == "offline"
    draft.set(
        "tracking.offline", offline, "wandb_online", why="WANDB_MODE" if offline and draft["wandb_online"] else ""
    )


def _resume(draft: Draft) -> None:
    resume_argument(draft, "resume_from_checkpoint", str(draft["output_dir"]))


def _required(draft: Draft) -> None:
    if not draft["base_model"]:
        draft.faults.append(Fault("--base_model", "is required", "name a folder or hub id"))


_DIALECT = Dialect(
    TOOL,
    ROWS,
    (_required, _fixed, set_precision, _attention_kernels, _batch, _lengths, _adapter_rest, _data, _tracking, _resume),
)


def from_command(command: Command, options: Options) -> Translation:
    """Raises InputError with every fault."""
    words, left = read_flags([_without_no(text) for text in command.arguments], switches=SWITCHES, lists=LISTS)
    if left:
        raise InputError([Fault(text, "belongs to no flag", "write --name value") for text in left])
    return _translate(words, options, command)


def from_keywords(values: Mapping[str, Any], options: Options | None = None) -> Translation:
    """The same for `train(base_model=…, bf16=True)` from Python."""
    words = [Word(name, value, f"{name}=", f"{name}={value!r}") for name, value in values.items() if value is not None]
    options = options or Options()
    return _translate(words, options, Command(TOOL, environment=inherited(options)))


def claims(command: Command) -> bool:
    """Axolotl's old scripts/finetune.py takes a YAML file first, and is another tool."""
    return command.name == "finetune.py" and (not command.arguments or command.arguments[0].startswith("-"))


def _translate(words: Sequence[Word], options: Options, command: Command) -> Translation:
    draft = Draft(
        _DIALECT, words, allow_unknown=options.allow_unknown, environment=command.environment, facts=command.facts
    )
    pad, why = pad_rule(str(draft["base_model"] or ""), options)
    draft.set("tokenizer.pad", pad, why=why)
    return draft.finish("train", environment=draft.environment)


def pad_rule(base_model: str, options: Options) -> tuple[str, str]:
    """The guide's: a PAD token is added where the tokenizer has none, or has id 0 for it.

    Of a local folder the tokenizer is looked at. Id 0 counts as a PAD where it is a special token, which texts do not
    contain: there the guide's code added a row for nothing.
    """
    try:
        settings = json.loads(options.read(f"{base_model.rstrip('/')}/tokenizer_config.json"))
    except (InputError, ValueError, RecursionError):
        return "add", "the guide's rule; the tokenizer could not be looked at, so one is added in any case"
    pad = settings.get("pad_token") if isinstance(settings, dict) else None
    pad = pad.get("content") if isinstance(pad, dict) else pad
    if not pad:
        return "add", "the guide's rule: the tokenizer has no PAD"
    added = settings.get("added_tokens_decoder") or {}
    found = next((key for key, token in added.items() if token.get("content") == pad), None)
    if found is None or (int(found) == 0 and not added[found].get("special")):
        return "add", f"the guide's rule: {pad} is a token that texts can contain"
    return "auto", f"the tokenizer has {pad} for it"


def _without_no(text: str) -> str:
    """Fire's `--nobf16` is false."""
    name = text.removeprefix("--no")
    return f"--{name}=False" if name != text and name in SWITCHES else text


def banner(translation: Translation) -> list[str]:
    """What finetune.py prints before it loads the model: every argument, whether given or not."""
    micro = dict.fromkeys(MICRO, translation.config["batch"]["micro"])  # two names for one thing
    given = {**translation.given, **micro}
    return ["Finetuning model with params:", *(f"{name}: {given.get(name)}" for name in ROWS)]


def _ready(facts: RunFacts) -> Lines:
    types = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
    lines = [f"Model loaded successfully. dtype: {types.get(facts.base, facts.base)}"]
    if facts.added_rows:
        lines.append(f"Adding dedicated PAD token: {facts.pad} (id {facts.pad_id})")
    could = facts.device == "cuda" and facts.attention == "sdpa"  # nowhere else is there anything to disable
    if could and facts.config.attention.cudnn == "off" and facts.compute == "bf16":
        lines.append("Disabled cuDNN SDPA for bf16 stability")
    return lines


def voice(translation: Translation) -> Voice:
    return Voice(started=lambda: banner(translation), ready=_ready, row=trainer_row)


FINETUNE = Tool(name=TOOL, claims_command=claims, from_command=from_command, voice=voice, rows=ROWS)
