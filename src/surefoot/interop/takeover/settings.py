"""Turn what a script handed over into a surefoot config, with the rules for TRL's and transformers' settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from surefoot.config.dump import shown
from surefoot.interop import trainer, trl
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import script_fault
from surefoot.interop.launch import Command, Options
from surefoot.interop.script.reader import LORA, PLAIN_TRAINER, QUANTIZED, ROWS
from surefoot.interop.script.rules import set_stopping
from surefoot.interop.settings import by_name
from surefoot.interop.takeover.session import RUN, Taken
from surefoot.interop.translation import Note, Translation
from surefoot.interop.trl.data import set_template
from surefoot.interop.trl.methods import METHODS, rows_of
from surefoot.interop.words import Word
from surefoot.method_facts.methods import METHODS as METHOD_FACTS
from surefoot.system.errors import InputError

TOOL = "Trainer"
_APPLIED = (
    *("dataset_text_field", "dataset_kwargs", "dataset_num_proc", "eos_token", "pad_token", "max_length", "packing"),
    *("max_seq_length", "truncation_mode", "shuffle_dataset", "packing_strategy", "eval_packing", "padding_free"),
    *("pad_to_multiple_of", "completion_only_loss", "assistant_only_loss", "chat_template_path", "model_init_kwargs"),
    *("trust_remote_code", "remove_unused_columns", "label_names", "num_of_sequences", "pad_token_id"),
)
"""Arguments that the script has applied: to its rows, its model and its tokenizer."""

_OF_ROWS = ("max_prompt_length", "max_completion_length", "label_pad_token_id", "padding_value", "max_target_length")
"""The same of rows that it has tokenized; a trainer whose answers are drawn reads them later."""

_METHODS = {f"{name}Trainer": name.lower() for name in ("DPO", "Reward", "KTO", "ORPO", "CPO", "GRPO", "RLOO")}
"""TRL's trainers besides SFTTrainer -> TRL's command."""

_LAYOUTS = {"answers": "tokens", "pairs": "token-pairs", "judged": "token-judged", "prompts": "prompts"}
_EVALUATES = {"eval_strategy", "evaluation_strategy"}  # the second before transformers 4.41
_SECRET = "_token"  # ending of the names of arguments that are secrets; to_dict() hides their values


def check_taken(taken: Taken, script: str, dropped: Collection[str], *, compared: bool = False) -> None:
    """Raise InputError for everything that surefoot cannot take over.

    dropped: names of what the user gives up.
    compared: the script's own loss will be compared with surefoot's.
    """
    refused = [one for one in _kept(taken, dropped) if not (compared and one.get("compared"))]
    if refused:
        raise InputError([_fault(one, script) for one in refused])


def own_losses(taken: Taken, dropped: Collection[str]) -> list[str]:
    """Return the names of the script's own code that computes its loss, and is not given up."""
    return [one["name"] for one in _kept(taken, dropped) if one.get("compared")]


def _kept(taken: Taken, dropped: Collection[str]) -> list[dict[str, Any]]:
    return [one for one in taken.record["refused"] if not (one["droppable"] and one["name"] in dropped)]


def translation_of(taken: Taken, command: Command, options: Options) -> Translation:
    """Return the config that trains what the script built. Raises InputError for settings that are not supported."""
    record = taken.record
    method = _METHODS.get(record["trainer"])
    own = by_name(*trl.ROWS.values(), *ROWS, *(() if record["trainer"] == "SFTTrainer" else PLAIN_TRAINER))
    if method is not None:
        own = by_name(*rows_of(method, trl.OWN_ROWS).values(), *ROWS)
    del own["model_name_or_path"]  # the model is handed over
    rules = (
        _data_rule(taken),
        trl.set_adapter,
        trainer.set_precision,
        trl.set_weights,
        trainer.set_do_train,
        *trainer.RULES,
        *(() if method is None else (METHODS[method].rule, _reference_rule(taken))),
    )
    alone = command.processes == 1 and record["devices"] > 1  # torch's DataParallel multiplies the batch
    facts = {**command.facts, **({"processes": record["devices"]} if alone else {})}
    draft = Draft(
        Dialect(TOOL, own, rules, trl.ALIASES),
        list(_words(taken, own)),
        Command(command.program, environment=command.environment, facts=facts),
        options,
    )
    if "adapter" in record:
        draft.set("adapter.initial", str(taken.folder / "adapter"))
    found = draft.finish("train")
    gone = [
        Note(one["name"], "listed", (), "surefoot's loss trains" if one.get("compared") else "given up by --drop", "")
        for one in record["refused"]
    ]
    passes = record["arguments"]["gradient_accumulation_steps"]
    if not record["whole_step_mean"] and passes > 1 and "prompts" not in record:
        unit = "tokens" if method is None else "examples"
        why = f"each micro-batch is averaged on its own there; here all {unit} of a step weigh the same"
        gone.append(Note("gradient_accumulation_steps", "changed", ("batch.size",), why, ""))
    noted = [Note(one["name"], "changed", (), one["what"], "") for one in record["noted"]]
    return Translation(**{**vars(found), "notes": (*found.notes, *gone, *noted)})


def _fault(one: Mapping[str, Any], script: str) -> Any:
    fix = one["fix"] or (f"give it up with --drop {one['name']}" if one["droppable"] else "")
    return script_fault(f"{script}: {one['name']}", one["what"], fix)


def _words(taken: Taken, rows: Mapping[str, Any]) -> Iterator[Word]:
    """Yield what the script's settings are, by value: those of the arguments that differ from the rows' defaults, and
    unknown ones that differ from their own."""
    record = taken.record
    counted = {"output_dir": f"{record['arguments']['output_dir']}/{RUN}", "max_steps": record["steps"]}
    counted["resume_from_checkpoint"] = record["resume"]  # the Trainer reads what train() gets, not its arguments
    if not record.get("eval_rows", 1):
        counted |= dict.fromkeys(_EVALUATES & record["arguments"].keys(), "no")
    given = {**record["arguments"], **counted, **record.get("rewards", {})}
    if given.get("steps_per_generation"):
        given["generation_batch_size"] = None  # which TRL computes from it
    defaults = record["defaults"]
    applied = {*_APPLIED, *(() if "prompts" in record else _OF_ROWS)}
    if not record.get("routed", True) or record["trainer"] == "SFTTrainer":  # which writes it into the model's config
        applied.add("router_aux_loss_coef")
    for name, value in given.items():
        known = trl.ALIASES.get(name) or name
        if known in applied or known.endswith(_SECRET) or value in ([], {}, ""):
            continue
        if value is None and (known not in rows or rows[known].default is None):
            continue
        if known not in rows and (name not in defaults or value == defaults[name]):
            continue
        if known in rows and value == rows[known].default:
            continue
        if known == "fsdp_config" and not given.get("fsdp"):
            continue
        yield Word(known, value, name, f"{name}={shown(value)}")
    flags = record["arguments"]
    short = {"bfloat16": "bf16", "float16": "fp16"}.get(record["dtype"])
    if short and not (flags.get("bf16") or flags.get("fp16")):
        yield Word(short, True, "model", f"dtype={record['dtype']}")  # its products are in it without autocast, too
    yield Word("dtype", record["dtype"], "model", f"dtype={record['dtype']}")
    yield from _of_adapter(record)
    for name, known in QUANTIZED.items():
        if name in record.get("quantised", {}) and known in rows:
            value = record["quantised"][name]
            if value != rows[known].default:
                yield Word(known, value, "model", f"{name}={shown(value)}")


def _of_adapter(record: Mapping[str, Any]) -> Iterator[Word]:
    if "adapter" not in record:
        return
    config = record["adapter"]
    yield Word("use_peft", True, "model", "peft_config")
    for name, known in LORA.items():
        value = record["adapted"] if name == "target_modules" else config.get(name)
        if name == "inference_mode" or value is None:
            continue
        yield Word(known, value, f"peft_config.{name}", f"{name}={shown(value)}")


def _data_rule(taken: Taken) -> Any:
    def rule(draft: Draft) -> None:
        record = taken.record
        method = _METHODS.get(record["trainer"])
        stage = "sft" if method is None else METHODS[method].stage
        layout = _LAYOUTS[METHOD_FACTS[stage].records]
        draft.set("stage", stage)
        draft.set("model.path", str(taken.folder / "model"))
        draft.set("data.train", {"path": str(taken.folder / "train.jsonl"), "format": layout})
        if record.get("eval_rows"):
            draft.set("data.eval", {"path": str(taken.folder / "eval.jsonl"), "format": layout})
        if "prompts" in record:
            trl.set_length(draft)
            set_template(draft, texts=False, seen=True)
        else:
            draft.set("data.max_length", max(8, record["longest"]))
        if record.get("row_tokens"):
            draft.set("batch.row_tokens", record["row_tokens"], why="packed anew: each epoch has its rows")
        if method is None:
            draft.set("data.train_on", "everything", why="the rows have their own labels")
        if method == "reward":
            draft.set("reward.init", str(taken.folder / "model"))
        set_stopping(draft)

    return rule


def _reference_rule(taken: Taken) -> Any:
    def rule(draft: Draft) -> None:
        if name := taken.record.get("reference"):
            draft.set("alignment.reference", str(taken.folder / name), why="the script's reference model")

    return rule
