"""The kinds of user errors, each with a stable code; `surefoot explain CODE` and docs/errors.md show them.

A code names the kind of problem; `Fault.where` names the place and `Fault.what` the details. Messages may be reworded
at any time; codes do not change, so that scripts and web searches can rely on them.
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
        "A flag, argument or key does not exist, has no value or a wrong one, or contradicts another.",
        "Read the command's --help.",
    ),
    "SF-USE-OUTPUT": ErrorCode(
        "The output path already exists, perhaps with files that surefoot did not write. No flag replaces those.",
        "Choose another path, or move the files away; --overwrite replaces only what surefoot wrote.",
    ),
    "SF-USE-FOLDER": ErrorCode(
        "The folder is not of the kind that the command needs: a run, a checkpoint, a capture or a failure folder.",
        "Name the folder that `surefoot train` (or capture) wrote; continue an unfinished run with --resume.",
    ),
    # The config
    "SF-CONFIG-FILE": ErrorCode("The config cannot be read.", "Check path, permissions and encoding (UTF-8)."),
    "SF-CONFIG-YAML": ErrorCode(
        "The config is not valid YAML for surefoot: a syntax error, a duplicate key, several documents, or too deep.",
        "Fix the line that is named; docs/configuration.md shows the format.",
    ),
    "SF-CONFIG-KEY": ErrorCode(
        "The config has a key that surefoot does not know.",
        "`surefoot explain` lists all keys; the message names similar ones.",
    ),
    "SF-CONFIG-VALUE": ErrorCode("A key has an invalid value.", "`surefoot explain KEY` lists the allowed values."),
    "SF-CONFIG-CONFLICT": ErrorCode(
        "Two settings exclude each other, or a setting needs something that this model, data set or machine lacks.",
        "Change one of the two; the message names both. A key at `auto` is decided by surefoot.",
    ),
    "SF-CONFIG-OVERRIDE": ErrorCode(
        "A key=value on the command line cannot be applied.", "Write it as in the config: optim.lr=1e-4."
    ),
    # Files and the disk
    "SF-FILE-MISSING": ErrorCode(
        "A file or folder does not exist.", "Check the path; relative paths start at the working directory."
    ),
    "SF-FILE-UNREADABLE": ErrorCode(
        "A file cannot be read: no permission, not the expected format, not UTF-8, or damaged.",
        "Get the file again, or fix the place that is named.",
    ),
    "SF-FILE-WRITE": ErrorCode(
        "A file cannot be written.", "Check permissions and free space. The previous content is unchanged."
    ),
    "SF-DISK-FULL": ErrorCode(
        "The disk does not have enough free space.",
        "Free some space, keep fewer checkpoints (checkpoint.keep), or use another disk.",
    ),
    "SF-FOLDER-BUSY": ErrorCode("Another process uses the folder.", "Wait for it to end, or stop it."),
    # Data
    "SF-DATA-FILE": ErrorCode(
        "A data file is not what its name says: an unknown kind, malformed JSON, CSV, Parquet or gzip, or not UTF-8.",
        "Fix the line that is named; docs/sources.md lists the kinds of files.",
    ),
    "SF-DATA-FORMAT": ErrorCode(
        "The records have a format that surefoot does not know, or that this method cannot train on.",
        "docs/formats.md lists the formats; name columns with data.columns, or write a function that reads them.",
    ),
    "SF-DATA-ROW": ErrorCode(
        "A record is invalid.",
        "Fix or remove it; the message names file, line and row. `surefoot data` lists all of them.",
    ),
    "SF-DATA-PICTURE": ErrorCode(
        "A picture is missing, damaged, too large, or used with a model or method that takes none.",
        "Fix the file or the record; docs/images.md lists the supported pictures and models.",
    ),
    "SF-DATA-EMPTY": ErrorCode(
        "A file or a prompt is empty, or no training data is left.",
        "Check the file and the share of it that is used.",
    ),
    "SF-DATA-DESCRIPTION": ErrorCode(
        "dataset_info.json has an invalid entry for a data set.",
        "Fix the entry; docs/sources.md describes its keys.",
    ),
    "SF-DATA-HUB": ErrorCode(
        "A data set on the hub lacks the subset, split or data file, or needs code, which surefoot never runs.",
        "Name an existing subset and split, or data files.",
    ),
    "SF-DATA-SHARES": ErrorCode(
        "The requested parts of the data are impossible: weights, shares, samples or a held-out part leave nothing.",
        "Change data.eval, the weights or num_samples.",
    ),
    "SF-DATA-TEMPLATE": ErrorCode(
        "The chat template is missing, cannot be rendered, or does not fit the tokenizer.",
        "Name another one with data.template; docs/templates.md lists them.",
    ),
    "SF-DATA-LENGTH": ErrorCode(
        "A text is longer than the model or the setting allows.", "Shorten it, or raise the limit that is named."
    ),
    "SF-LABEL-PAD": ErrorCode(
        "PAD is a token that answers contain, so its labels would be masked.",
        "Choose another tokenizer.pad, or leave it at auto.",
    ),
    "SF-LABEL-STOP": ErrorCode(
        "An answer does not end with a trained stop token, so the model would not learn to stop.",
        "Use a template that ends each answer with the tokenizer's EOS token.",
    ),
    # The hub and other servers
    "SF-HUB-ACCESS": ErrorCode(
        "The hub denies access: gated, private, no token, or a token without permission.",
        "Accept the model's terms on its page, then `hf auth login`.",
    ),
    "SF-HUB-MISSING": ErrorCode(
        "The hub has no such repository, revision or file.", "Check the name and the revision."
    ),
    "SF-HUB-OFFLINE": ErrorCode(
        "Files are not in the cache, and the hub cannot be reached.",
        "Download them while online, or unset HF_HUB_OFFLINE.",
    ),
    "SF-HUB-PUSH": ErrorCode(
        "A model cannot be uploaded because of its name, its visibility, or the content of its files.",
        "Do what the message names, then push again.",
    ),
    "SF-SERVER": ErrorCode(
        "A server of yours (vLLM, a reward model) does not answer as expected.", "Check its address, version and log."
    ),
    # Models, tokenizers and adapters
    "SF-MODEL-WEIGHTS": ErrorCode(
        "Weight files are missing, damaged, pickled, or not where the index says.",
        "Get the files again; `surefoot convert` reads pickled ones safely.",
    ),
    "SF-MODEL-KEYS": ErrorCode(
        "The names or shapes of the weights do not match the config.",
        "`surefoot convert` recognizes other layouts and renames them.",
    ),
    "SF-MODEL-KIND": ErrorCode(
        "Models of this kind cannot be trained, or not be used with this command.",
        "docs/families.md lists the supported models.",
    ),
    "SF-MODEL-QUANTISED": ErrorCode(
        "The model's weights are stored in an unsupported quantized format (bitsandbytes, NVFP4, 3 bits, ...).",
        "Use the original model; precision.base: nf4 or int8 quantizes it while loading.",
    ),
    "SF-MODEL-NUMBERS": ErrorCode(
        "Weights or logits are NaN, infinite or too large, or a position sees later tokens.",
        "Get the model again, or use another precision if its values need it.",
    ),
    "SF-TEACHER": ErrorCode(
        "Stored distributions of a teacher are damaged, or do not fit the run's data, template, length or temperature.",
        "Run `surefoot teach` with the run's config; docs/distill.md describes the folder.",
    ),
    "SF-TOKENIZER": ErrorCode(
        "The tokenizer cannot be read, has no fast version, lacks a token, or is not the expected one.",
        "Use the model's own tokenizer files.",
    ),
    "SF-ADAPTER-TARGETS": ErrorCode(
        "adapter.targets or modules_to_save names modules that do not exist, or weights that cannot carry an adapter.",
        "Use all-linear, or names from the list in the message.",
    ),
    "SF-ADAPTER-SHALLOW": ErrorCode(
        "The adapter would miss most of the decoder's weights, such as the experts of a mixture.",
        "Follow the message to reach them, or set adapter.experts: false to leave them frozen.",
    ),
    "SF-ADAPTER-FIT": ErrorCode(
        "The adapter does not fit: another base, vocabulary or shape, or settings that cannot be converted.",
        "Name the base model that it was trained on.",
    ),
    "SF-ADAPTER-DORA": ErrorCode(
        "DoRA cannot be used for this weight: its rows have norm zero, or it is an embedding, expert or router.",
        "Remove the module from adapter.targets, or use lora.",
    ),
    "SF-BOS": ErrorCode(
        "A scaled BOS embedding is not possible with this model or tokenizer, or its factor is missing or wrong.",
        "docs/bos.md lists its requirements.",
    ),
    "SF-CONVERT-LAYOUT": ErrorCode(
        "The weights cannot be converted to the requested layout, or their own layout is ambiguous.",
        "docs/convert.md lists the layouts and their requirements (such as --base).",
    ),
    "SF-CONVERT-ZERO": ErrorCode(
        "A DeepSpeed checkpoint is incomplete or has a format that cannot be merged.",
        "Put the files of all ranks into one folder.",
    ),
    # A run
    "SF-PLAN-BROKEN": ErrorCode(
        "The model or engine does not match the plan (types, parameters, kernel). The run stops before step 1.",
        "This is a bug of surefoot or of a library: report it with plan.json and environment.json.",
    ),
    "SF-FAST-PATH": ErrorCode(
        "A fast path computes other values than the plain code on this model.",
        "Disable it; the message names the key.",
    ),
    "SF-MEMORY": ErrorCode(
        "Memory ran out, or would according to the forecast.",
        "Lower batch.micro or data.max_length, set gradient_checkpointing: on, or use an adapter or nf4.",
    ),
    "SF-DEVICE": ErrorCode("The device failed.", "Continue with --resume; if it fails again, test the device."),
    "SF-PARALLEL": ErrorCode(
        "The processes of a run do not match (number, launcher's variables, engine) or cannot reach each other.",
        "docs/several-processes.md says how to start them.",
    ),
    "SF-RANKS-DIFFER": ErrorCode(
        "Processes of one run have different values or files, or a process has ended.",
        "Give all machines the same files, then continue with --resume.",
    ),
    "SF-PACKAGE": ErrorCode(
        "A required package is not installed, or does not work here.", "Install what the message names."
    ),
    "SF-OWN-FUNCTION": ErrorCode(
        "Your function (loss, metric, reward, record reader) is missing, raised, or returned a wrong value.",
        "docs/python.md describes their arguments and return values.",
    ),
    "SF-DIVERGED": ErrorCode(
        "The run diverged: loss, gradients or optimizer moments stayed NaN or infinite.",
        "`surefoot replay` on the failure folder names the first module; lower the learning rate, or resume earlier.",
    ),
    "SF-PPO": ErrorCode(
        "PPO cannot continue: answers are empty or not scored, or the policy repeatedly left its bounds.",
        "docs/ppo.md explains each under When training is held back.",
    ),
    "SF-GRPO": ErrorCode(
        "GRPO cannot continue: answers are empty or not scored, no group's scores differ, or ratios left their bound.",
        "docs/grpo.md explains each under what stops a run.",
    ),
    "SF-GRPO-MISMATCH": ErrorCode(
        "The engine that samples GRPO's answers gives them other log-probabilities than the trainer.",
        "Check that it serves these weights in this type; see docs/grpo.md, under engine and trainer.",
    ),
    "SF-NOTHING-LEARNED": ErrorCode(
        "A run on rewards learned nothing: scores never differed, every update was cut, or the adapter never moved.",
        "docs/grpo.md explains each under a run that learns nothing. Nothing was published.",
    ),
    "SF-ENVIRONMENT": ErrorCode(
        "An environment (grpo.environment) fails, answers otherwise than described, or has no place in the template.",
        "docs/grpo.md describes environments, under turns with tools.",
    ),
    "SF-REWARD": ErrorCode(
        "A reward in grpo.rewards is unknown, lacks a key, or finds no reference answer in a record.",
        "docs/grpo.md lists the rewards and their keys.",
    ),
    # Checkpoints
    "SF-CHECKPOINT-DAMAGED": ErrorCode(
        "A checkpoint, log or record is not as written: bytes changed, files missing or added.",
        "Use an older checkpoint; `surefoot verify` shows which are intact.",
    ),
    "SF-CHECKPOINT-NONE": ErrorCode("There is no checkpoint to resume from.", "Start the run without --resume."),
    "SF-SERVED-BASE": ErrorCode(
        "A server answers like the base model: it accepted the adapter, or its name, but does not apply it.",
        "Name the adapter with --name; if it is named, its keys and the server's modules have different prefixes.",
    ),
    "SF-SERVED-OTHER": ErrorCode(
        "A server's log-probabilities match neither the trained model nor its base.",
        "Check its adapter, base, adapter scale and quantization.",
    ),
    "SF-SERVED-UNDECIDED": ErrorCode(
        "Training changed less than rounding, so the served model could be the trained one or its base.",
        "Serve in fp32, compare on data like the training's (--data), or give --threshold.",
    ),
    "SF-SERVED-TEMPLATE": ErrorCode(
        "A server formats dialogues with other tokens than training.",
        "Serve with the tokenizer and chat template in the trained model's folder.",
    ),
    "SF-SERVED-STOP": ErrorCode(
        "The token that ended answers in training does not end them on the server.",
        "Serve with the trained model's generation_config.json, or send stop_token_ids with every request.",
    ),
    "SF-VERIFY-DIFFERS": ErrorCode(
        "Two runs or checkpoints are not identical.",
        "The table lists the differences; `surefoot compare` explains them.",
    ),
    "SF-RESUME-CHANGED": ErrorCode(
        "The checkpoint belongs to another config, model, data set, tokenizer or loss.",
        "Restore the original, or start another run.",
    ),
    # After training
    "SF-EVALUATE": ErrorCode(
        "An evaluation cannot be made or compared: unknown sets or tasks, other inputs, or another evaluation's files.",
        "docs/evaluate.md describes each evaluation's requirements.",
    ),
    "SF-EXPORT": ErrorCode(
        "The export cannot be made, or does not compute the same as the trained model. Nothing was written.",
        "docs/export.md lists what can be exported in which format.",
    ),
    "SF-REPLAY": ErrorCode("The step cannot be repeated as it was.", "Restore the files that the message names."),
    "SF-TUNE": ErrorCode(
        "No setting could be tried, or none passed.", "Fix what the message names; `surefoot plan` shows the forecast."
    ),
    # Other tools' configs and commands
    "SF-TRANSLATE-COMMAND": ErrorCode(
        "The command or config is not one that surefoot can translate.", "docs/dialects.md lists tools and commands."
    ),
    "SF-TRANSLATE-SETTING": ErrorCode(
        "A setting of the other tool has no counterpart, or an invalid value.",
        "Remove it, or set the closest key of surefoot.",
    ),
    "SF-TAKE-OVER": ErrorCode(
        "What a script built is trained here with another loss or gradient than in the script, so it was not begun.",
        "Compare the labels (`surefoot data`); a loss of the script's own cannot be taken over. Please report others.",
    ),
    "SF-TRANSLATE-SCRIPT": ErrorCode(
        "The script does something that cannot be read from its text.",
        "Write a config: `surefoot init MODEL DATA` begins one.",
    ),
}
