"""The last lines of a run: results, files, and commands to type next. Every command works when pasted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot.report.conversion import conversion_line, read_conversion
from surefoot.report.results import ROLLOUT
from surefoot.report.wording import duration_text, times
from surefoot.system.folders import AVERAGE, CRITIC_FOLDER, QUANTISED
from surefoot.system.messages import counted, size_text, was

_FILES = (
    ("adapter_model.safetensors", "the trained adapter"),
    ("model.safetensors", "the trained model"),
    ("model.safetensors.index.json", "the trained model, in several files"),
    (QUANTISED, "the trained model in fewer bits, for transformers with torchao"),
    ("value_head.safetensors", "the value head, which computes the score"),
    (CRITIC_FOLDER, "the critic, in the format of a reward model"),
    (AVERAGE, "the moving average of the policy's weights"),
    ("README.md", "model card with code to load it"),
    ("report.html", "the whole run on one page"),
    ("all_results.json", "all figures"),
    ("training_reward.png", "reward curve"),
    ("training_loss.png", "loss curve"),
    ("training_eval_loss.png", "evaluation loss curve"),
    ("trainer_log.jsonl", "every logged step"),
    ("plan.json", "every choice with its reason"),
    ("run.log", "all output of the run"),
)
STEPS, OTHER = "in steps", "other"  # parts of a run's time
_SHARE = 0.01  # of the total time; smaller parts are added to `other`
_LEAST = 0.05  # seconds; less is not shown
EXAMPLE_PROMPT = "Give three tips for staying healthy."  # if the training data have no short question
ABOUT_PICTURE = "What does the picture show?"
TO_TRY = "to_try"  # key of data.json with `prompt`, `texts`, `held_out` and `picture` of `finished`, for the report


def finished(
    run: Path,
    results: Mapping[str, object],
    *,
    step: int,
    total_steps: int,
    early: bool,
    here: Mapping[str, float],
    whole: Mapping[str, float],
    best_step: int | None,
    skipped: int,
    rollbacks: int = 0,
    prompt: str = EXAMPLE_PROMPT,
    texts: bool = False,
    scores: bool = False,
    held_out: bool = False,
    picture: str = "",
) -> list[str]:
    """Return the last lines of a finished run.

    early: whether early stopping ended it.
    here, whole: seconds by activity, of this session and of the whole run; equal if there was one session.
    skipped: number of non-finite steps.
    rollbacks: how often the run went back to a checkpoint.
    prompt: an example to try.
    texts: whether it learned plain texts without turns.
    scores: whether it trained a reward model.
    held_out: whether there are pairs that it did not train on.
    picture: file to show with the prompt; "" if it learned without pictures.
    """
    conversion = read_conversion(run)
    return [
        *_ending(step, total_steps, early, here, whole),
        *_rollouts(results),
        *_figures(results, best_step),
        "all weights are finite"
        + (f"; {counted(skipped, 'non-finite step')} {was(skipped)} skipped" if skipped else ""),
        *([conversion_line(conversion)] if conversion else []),
        *([f"went back to a checkpoint {times(rollbacks)}: see rollbacks.json"] if rollbacks else []),
        "",
        f"files in {run}:",
        *files_left(run),
        "",
        "next:",
        *(f"  {command}" for _, command in next_commands(run, prompt, texts, scores, held_out, picture)),
    ]


def stopped(run: Path, *, step: int, total_steps: int, command: Sequence[str]) -> list[str]:
    """command: the user's command with --resume, as separate words; empty when called from Python."""
    return [
        f"stopped after step {step}/{total_steps}; saved checkpoint-{step}; continue with:",
        f"  {shlex.join(command) if command else 'surefoot.train(…, resume=True)'}",
    ]


def next_commands(
    run: Path,
    prompt: str = EXAMPLE_PROMPT,
    texts: bool = False,
    scores: bool = False,
    held_out: bool = False,
    picture: str = "",
) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs.

    texts: the model continues the plain prompt, and chat makes no sense.
    scores: a reward model, which generates nothing; it is measured on the run's held-out pairs, if any.
    picture: as in `finished`.
    """
    folder, words = shlex.quote(str(run)), shlex.quote(prompt)
    verify = ("check every file", f"surefoot verify {folder}")
    if scores:
        measure = [("measure it on the held-out pairs", f"surefoot evaluate reward {folder}")] if held_out else []
        return [*measure, verify]
    if texts:
        return [("continue a text", f"surefoot generate {folder} --raw --prompt {words}"), verify]
    shown = f" --image {shlex.quote(picture)}" if picture else ""
    return [
        ("talk to it", f"surefoot chat {folder}"),
        ("ask one question", f"surefoot generate {folder}{shown} --prompt {words}"),
        verify,
    ]


def resume_command(typed: Sequence[str]) -> list[str]:
    """The words that resume a run: the typed ones with --resume in place of --overwrite. Words after `--` belong to
    another tool's command and stay."""
    if not typed:
        return []
    end = typed.index("--") if "--" in typed else len(typed)
    kept = [word for word in typed[:end] if word not in {"--overwrite", "--resume"}]
    return [*kept, "--resume", *typed[end:]]


def files_left(run: Path) -> list[str]:
    """The existing files and folders worth opening, with size and purpose."""
    there = [(run / name, purpose) for name, purpose in _FILES if (run / name).exists()]
    found = [(f"{path.name}/" if path.is_dir() else path.name, _size(path), purpose) for path, purpose in there]
    width = max((len(name) for name, _, _ in found), default=0)
    return [f"  {name:<{width}}  {size_text(size):>9}  {purpose}" for name, size, purpose in found]


def _size(path: Path) -> int:
    """Size of a file in bytes, or of all files in a folder."""
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file()) if path.is_dir() else path.stat().st_size


def time_breakdown(seconds: Mapping[str, float]) -> str:
    """Format `41 s: 20 s in steps, 12 s set-up, 5.0 s evaluation`: the total, the largest parts, and the rest as
    `other`."""
    whole = sum(seconds.values())
    named = {what: spent for what, spent in seconds.items() if what != OTHER and spent >= _SHARE * whole}
    parts = [f"{duration_text(spent)} {what}" for what, spent in sorted(named.items(), key=lambda one: -one[1])]
    if (left := whole - sum(named.values())) >= _LEAST:
        parts.append(f"{duration_text(left)} {OTHER}")
    return f"{duration_text(whole)}: {', '.join(parts)}"


def _ending(
    step: int, total_steps: int, early: bool, here: Mapping[str, float], whole: Mapping[str, float]
) -> list[str]:
    first = f"done: {counted(step, 'step')}"
    if early:
        first = f"stopped at step {step} of {total_steps}, because the evaluation no longer improved"
    again = [] if here == whole else [f"this session: {time_breakdown(here)}"]
    return [f"{first} in {time_breakdown(whole)}", *again]


def _figures(results: Mapping[str, object], best_step: int | None) -> list[str]:
    known = {
        "train_loss": "training loss {:.4g}",
        "eval_loss": "evaluation loss {:.4g}",
        "eval_accuracy": "accuracy {:.1%}",
        "eval_reward_accuracy": "reward accuracy {:.1%}",
        "eval_reward": "reward {:.4g}",
        "eval_kl": "KL {:.4g}",
        "eval_response_length": "{:.1f} tokens per answer",
    }
    if results.get("eval_reward") is not None:
        del known["eval_loss"]  # only minus the reward
        known["eval_reward"] = "evaluation reward {:.4g}"
    if results.get(f"train_last_{ROLLOUT[0]}") is not None:
        del known["train_loss"]  # near 0 whatever is learned
    figures = [form.format(results[key]) for key, form in known.items() if results.get(key) is not None]
    before = ", before any training" if best_step == 0 else ""
    best = [f"best checkpoint-{best_step}{before}"] if best_step is not None else []
    return [" · ".join(figures + best)] if figures or best else []


def _rollouts(results: Mapping[str, object]) -> list[str]:
    """First and last rollout of stages ppo and grpo, whose loss says little."""
    forms = tuple(zip(ROLLOUT, ("reward {:.4g}", "KL {:.3g}", "{:.1f} tokens per answer"), strict=True))
    found = {
        when: [form.format(results[key]) for name, form in forms if (key := f"train_{when}_{name}") in results]
        for when in ("first", "last")
    }
    return [f"{when} rollout: {' · '.join(figures)}" for when, figures in found.items() if figures]
