"""The kinds of faults that users meet, each with a stable code; `surefoot explain CODE` and docs/errors.md show them.

A code names the kind of problem, not the place: `Fault.where` names the place and `Fault.what` the details. Messages
may be reworded at any time; codes stay, so that scripts can rely on them and a search finds the same page tomorrow.
"""

from __future__ import annotations

from typing import NamedTuple


class ErrorCode(NamedTuple):
    """Cause and remedy of a kind of fault.

    cause: what happened.
    remedy: what to do about it.
    """

    cause: str
    remedy: str


CODES: dict[str, ErrorCode] = {
    # The command line
    "SF-USE-FLAG": ErrorCode(
        "A flag, argument or key does not exist here, lacks its value or has a wrong one, or contradicts another.",
        "Read the command's --help.",
    ),
    "SF-USE-OUTPUT": ErrorCode(
        "The output path is taken, often by files that surefoot did not write. No flag replaces those.",
        "Choose another path, or move the files away; --overwrite replaces only what surefoot wrote.",
    ),
    "SF-USE-FOLDER": ErrorCode(
        "The folder is not what the command works on: a run, a checkpoint, a capture or a failure folder.",
        "Name the folder that `surefoot train` (or capture) wrote; a run that is not finished goes on with --resume.",
    ),
    # The config
    "SF-CONFIG-FILE": ErrorCode("The config cannot be read.", "Check path, permissions and encoding (UTF-8)."),
    "SF-CONFIG-YAML": ErrorCode(
        "The config is not YAML that surefoot reads: a syntax error, a key twice, several documents, or too deep.",
        "Mend the line that is named; docs/configuration.md shows the form.",
    ),
    "SF-CONFIG-KEY": ErrorCode(
        "The config has a key that surefoot does not know.",
        "`surefoot explain` lists all keys; the message names near ones.",
    ),
    "SF-CONFIG-VALUE": ErrorCode(
        "A key has a value that it cannot take.", "`surefoot explain KEY` says what may stand there."
    ),
    "SF-CONFIG-CONFLICT": ErrorCode(
        "Two settings exclude each other, or a setting needs something that this model, data set or machine lacks.",
        "Change one of the two; the message names both. Leave a key at `auto` to have it decided.",
    ),
    "SF-CONFIG-OVERRIDE": ErrorCode(
        "A key=value on the command line cannot be applied.", "Write it as the config does: optim.lr=1e-4."
    ),
    # Files and the disk
    "SF-FILE-MISSING": ErrorCode(
        "A file or folder does not exist.", "Check the path; relative paths start at the working directory."
    ),
    "SF-FILE-UNREADABLE": ErrorCode(
        "A file cannot be read: no permission, not the expected format, not UTF-8, or damaged.",
        "Get the file again, or mend the place that is named.",
    ),
    "SF-FILE-WRITE": ErrorCode(
        "A file cannot be written.", "Check permissions and free space. What was there before is untouched."
    ),
    "SF-DISK-FULL": ErrorCode(
        "The disk has less room than is needed.",
        "Free some, keep fewer checkpoints (checkpoint.keep), or use another disk.",
    ),
    "SF-FOLDER-BUSY": ErrorCode("Another process uses the folder.", "Wait for it, or end it."),
    # Data
    "SF-DATA-FILE": ErrorCode(
        "A data file is not what its name says: an unknown kind, malformed JSON, CSV, Parquet or gzip, or not UTF-8.",
        "Mend the line that is named; docs/sources.md lists the kinds.",
    ),
    "SF-DATA-FORMAT": ErrorCode(
        "The records have a layout that surefoot does not know, or that this method cannot learn from.",
        "docs/formats.md lists the layouts; name columns with data.columns, or read them with a function of your own.",
    ),
    "SF-DATA-ROW": ErrorCode(
        "A record is faulty.",
        "Mend or remove it; the message names file, line and row. `surefoot data` shows all of them.",
    ),
    "SF-DATA-PICTURE": ErrorCode(
        "A picture is missing, damaged, too large, or named where none can be learned.",
        "Mend the file or the record; docs/images.md says which pictures are read, and by which models.",
    ),
    "SF-DATA-EMPTY": ErrorCode(
        "A file or a prompt is empty, or nothing to learn from is left of the data.",
        "Check the file and the share that is taken of it.",
    ),
    "SF-DATA-DESCRIPTION": ErrorCode(
        "dataset_info.json describes a data set in a way that cannot be followed.",
        "Mend the entry; docs/sources.md says what it may hold.",
    ),
    "SF-DATA-HUB": ErrorCode(
        "A data set of the hub has no such subset, split or data file, or is built by code, which is never run.",
        "Name subset and split, or data files that can be read as they are.",
    ),
    "SF-DATA-SHARES": ErrorCode(
        "The parts that are asked for cannot be taken: weights, shares, samples or a held-out part leave nothing.",
        "Change data.eval, the weights or num_samples.",
    ),
    "SF-DATA-TEMPLATE": ErrorCode(
        "The chat template is missing, cannot be rendered, or does not fit the tokenizer.",
        "Name another with data.template; docs/templates.md lists them.",
    ),
    "SF-DATA-LENGTH": ErrorCode(
        "A text is longer than the model or the setting allows.", "Shorten it, or raise the limit that is named."
    ),
    "SF-LABEL-PAD": ErrorCode(
        "PAD is a token that is learned, so answers would lose it.",
        "Choose another tokenizer.pad, or leave it at auto.",
    ),
    "SF-LABEL-STOP": ErrorCode(
        "An answer does not end with a stop token that is learned, so the model would not learn to stop.",
        "Use a template that ends each answer with the tokenizer's end of sequence.",
    ),
    # The hub and other servers
    "SF-HUB-ACCESS": ErrorCode(
        "The hub refuses access: gated, private, no token, or a token without the right.",
        "Accept the model's terms on its page, then `hf auth login`.",
    ),
    "SF-HUB-MISSING": ErrorCode(
        "The hub has no such repository, revision or file.", "Check the name and the revision."
    ),
    "SF-HUB-OFFLINE": ErrorCode(
        "Files are not in the cache, and the hub cannot be reached.",
        "Download them where there is a network, or unset HF_HUB_OFFLINE.",
    ),
    "SF-HUB-PUSH": ErrorCode(
        "A model cannot be uploaded as it is: its name, its visibility, or what its files hold.",
        "Do what the message names, then push again.",
    ),
    "SF-SERVER": ErrorCode(
        "A server of yours (vLLM, a reward model) does not answer as expected.", "Check address, version and its log."
    ),
    # Models, tokenizers and adapters
    "SF-MODEL-WEIGHTS": ErrorCode(
        "Weight files are missing, damaged, pickled, or do not lie where the index says.",
        "Get the files again; `surefoot convert` reads pickled ones safely.",
    ),
    "SF-MODEL-KEYS": ErrorCode(
        "The names or shapes of the weights do not match the config.",
        "`surefoot convert` recognises other layouts and renames them.",
    ),
    "SF-MODEL-KIND": ErrorCode(
        "The model is of a kind that cannot be trained here, or that this command does not take.",
        "docs/families.md lists what can.",
    ),
    "SF-MODEL-QUANTISED": ErrorCode(
        "The model's weights are stored in a quantised form that is not read (bitsandbytes, NVFP4, 3 bits, ...).",
        "Take the model that it was made from; precision.base: nf4 or int8 quantises that while it is loaded.",
    ),
    "SF-MODEL-NUMBERS": ErrorCode(
        "Weights or logits are NaN, infinite or too large, or a position sees later tokens.",
        "Get the model again; use another precision if its values need it.",
    ),
    "SF-TOKENIZER": ErrorCode(
        "The tokenizer cannot be read, has no fast form, lacks a token, or differs from the one that is needed.",
        "Use the tokenizer files that belong to the model.",
    ),
    "SF-ADAPTER-TARGETS": ErrorCode(
        "adapter.targets or modules_to_save names modules that do not exist, or weights that cannot carry an adapter.",
        "Use all-linear, or names of the message's list.",
    ),
    "SF-ADAPTER-SHALLOW": ErrorCode(
        "The adapter would leave most of the decoder's weights out, which nobody asked for (the experts of a mixture).",
        "Take the way that the message names to reach them, or adapter.experts: false to leave them frozen.",
    ),
    "SF-ADAPTER-FIT": ErrorCode(
        "The adapter does not fit: another base, vocabulary or shape, or settings that cannot be carried over.",
        "Name the base that it was trained over.",
    ),
    "SF-ADAPTER-DORA": ErrorCode(
        "DoRA cannot be used for this weight: its rows have norm zero, or it is an embedding, expert or router.",
        "Leave the module out, or use lora.",
    ),
    "SF-BOS": ErrorCode(
        "The scaled BOS embedding cannot be had with this model or tokenizer, or its factor is missing or wrong.",
        "docs/bos.md says what it needs.",
    ),
    "SF-CONVERT-LAYOUT": ErrorCode(
        "The weights cannot be turned into the layout that is asked for, or theirs is not clear.",
        "docs/convert.md lists the layouts and what each needs (such as --base).",
    ),
    "SF-CONVERT-ZERO": ErrorCode(
        "A DeepSpeed checkpoint is incomplete or was written in a way that cannot be put together.",
        "Bring the files of all ranks together.",
    ),
    # A run
    "SF-PLAN-BROKEN": ErrorCode(
        "What was built is not what the plan says (types, parameters, kernel, engine). The run stops before step 1.",
        "This is a fault of surefoot or of a library: report it with plan.json and environment.json.",
    ),
    "SF-FAST-PATH": ErrorCode(
        "A fast path computes something else than the plain one on this model.",
        "Turn it off; the message names the key.",
    ),
    "SF-MEMORY": ErrorCode(
        "Memory ran out, or would by forecast.",
        "Smaller batch.micro, gradient_checkpointing: on, shorter data.max_length, an adapter, or nf4.",
    ),
    "SF-DEVICE": ErrorCode("The device failed.", "Go on with --resume; if it fails again, test the device."),
    "SF-PARALLEL": ErrorCode(
        "The processes of a run do not fit together (number, launcher's variables, engine) or cannot reach each other.",
        "docs/several-processes.md says how to start them.",
    ),
    "SF-RANKS-DIFFER": ErrorCode(
        "Processes of one run hold different values or see different files, or a process is gone.",
        "Give all machines the same files, then go on with --resume.",
    ),
    "SF-PACKAGE": ErrorCode(
        "A package that this needs is not installed, or not usable here.", "Install what the message names."
    ),
    "SF-OWN-FUNCTION": ErrorCode(
        "A function of yours (loss, metric, reward, record reader) is missing, raised, or returned something else.",
        "docs/python.md says what each is given and returns.",
    ),
    "SF-DIVERGED": ErrorCode(
        "The numbers went wrong and stayed wrong: loss, gradients or optimizer moments are NaN or infinite.",
        "`surefoot replay` on the failure folder names the first module; lower the rate, or resume earlier.",
    ),
    "SF-PPO": ErrorCode(
        "PPO cannot go on: answers are empty or not scored, or the policy left its bounds again and again.",
        "docs/ppo.md, under When training is held back, says what each means.",
    ),
    "SF-GRPO": ErrorCode(
        "GRPO cannot go on: answers are empty or not scored, no group's scores differ, or ratios left their bound.",
        "docs/grpo.md, under what stops a run, says what each means.",
    ),
    "SF-GRPO-MISMATCH": ErrorCode(
        "The engine that draws GRPO's answers finds them more or less likely than the code that learns does.",
        "See that it serves these weights in this type; docs/grpo.md, under engine and trainer, says what corrects it.",
    ),
    "SF-NOTHING-LEARNED": ErrorCode(
        "A run on rewards learned nothing: no scores ever differed, every update was cut, or the adapter never moved.",
        "docs/grpo.md, under a run that learns nothing, says what each means. Nothing was published.",
    ),
    "SF-REWARD": ErrorCode(
        "A reward of grpo.rewards is none that surefoot knows, lacks a key, or finds no right answer in a record.",
        "docs/grpo.md lists the rewards and their keys.",
    ),
    # Checkpoints
    "SF-CHECKPOINT-DAMAGED": ErrorCode(
        "A checkpoint, log or record is not what was written: bytes changed, files missing or added.",
        "Use an older checkpoint; `surefoot verify` shows which verify.",
    ),
    "SF-CHECKPOINT-NONE": ErrorCode("There is no checkpoint to go on from.", "Start the run without --resume."),
    "SF-SERVED-BASE": ErrorCode(
        "A server answers with the base model: it took the adapter, or a model of that name, and does not apply it.",
        "Name the adapter with --name; where it is named, its keys have another prefix than the server's modules.",
    ),
    "SF-SERVED-OTHER": ErrorCode(
        "A server's log-probabilities are neither those of the trained model nor those of its base.",
        "Check which adapter and base it serves, the adapter's scale, and whether it quantises.",
    ),
    "SF-SERVED-UNDECIDED": ErrorCode(
        "Training changed less than rounding does, so trained model and base cannot be told apart in what is served.",
        "Serve in fp32, compare on data like the training's (--data), or give --threshold.",
    ),
    "SF-SERVED-TEMPLATE": ErrorCode(
        "A server lays dialogues out in other tokens than training did.",
        "Serve with the tokenizer and chat template that lie beside the trained model.",
    ),
    "SF-SERVED-STOP": ErrorCode(
        "The token that ended answers in training does not end them on the server.",
        "Serve with the trained model's generation_config.json, or send stop_token_ids with every request.",
    ),
    "SF-VERIFY-DIFFERS": ErrorCode(
        "Two runs or checkpoints are not identical.", "The table names the differences; `surefoot compare` says why."
    ),
    "SF-RESUME-CHANGED": ErrorCode(
        "What the run goes on from belongs to another config, model, data set, tokenizer or loss.",
        "Restore it, or start another run.",
    ),
    # After training
    "SF-EVALUATE": ErrorCode(
        "An evaluation cannot be made or compared: unknown sets or tasks, other inputs, or another evaluation's files.",
        "docs/evaluate.md says what goes together.",
    ),
    "SF-EXPORT": ErrorCode(
        "The export cannot be made, or does not compute what the trained model computes. Nothing is left behind.",
        "docs/export.md lists what can be exported in which form.",
    ),
    "SF-REPLAY": ErrorCode("The step cannot be taken again as it was.", "Restore the files that the message names."),
    "SF-TUNE": ErrorCode(
        "No setting could be tried, or none passed.", "Mend what the message names; `surefoot plan` shows the forecast."
    ),
    # Other tools' configs and commands
    "SF-TRANSLATE-COMMAND": ErrorCode(
        "The command or config is not one that surefoot reads.", "docs/dialects.md lists tools and commands."
    ),
    "SF-TRANSLATE-SETTING": ErrorCode(
        "A setting of the other tool has no counterpart, or a value that cannot be read.",
        "Take it out, or set the key of surefoot that comes nearest.",
    ),
    "SF-TRANSLATE-SCRIPT": ErrorCode(
        "The script does what cannot be read from its text.", "Write a config: `surefoot init MODEL DATA` begins one."
    ),
}
