"""The last lines of a run: what came out, where it lies, and what to type next. Every command works when pasted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot.report.results import ROLLOUT
from surefoot.report.wording import duration_text, times
from surefoot.system.folders import AVERAGE, CRITIC_FOLDER
from surefoot.system.messages import counted, size_text, was

_FILES = (
    ("adapter_model.safetensors", "the trained adapter"),
    ("model.safetensors", "the trained model"),
    ("model.safetensors.index.json", "the trained model, in several files"),
    ("value_head.safetensors", "the value head, which makes a score of it"),
    (CRITIC_FOLDER, "the critic, a reward model like any other"),
    (AVERAGE, "the moving average of the trained policy, a model like it"),
    ("README.md", "model card with code to load it"),
    ("report.html", "the whole run on one page"),
    ("all_results.json", "all figures"),
    ("training_loss.png", "loss curve"),
    ("training_eval_loss.png", "evaluation loss curve"),
    ("trainer_log.jsonl", "every logged step"),
    ("plan.json", "every choice with its reason"),
    ("run.log", "everything said here"),
)
STEPS, OTHER = "in steps", "other"  # of the seconds that a run took
_SHARE = 0.01  # of all the time: less has no name of its own
_LEAST = 0.05  # seconds; less is not told
EXAMPLE_PROMPT = "Give three tips for staying healthy."  # where the training data have no short question
TO_TRY = "to_try"  # in data.json: `prompt`, `texts` and `held_out` of `finished`, for the report


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
) -> list[str]:
    """The last lines of a finished run.

    early: stopped by early stopping.
    here, whole: seconds of this start and of the whole run by what took them; equal where there was one start.
    skipped: non-finite steps.
    rollbacks: how often the run went back to a checkpoint.
    prompt: one to try.
    texts: the run learned texts without turns.
    scores: it made a reward model.
    held_out: there are pairs that it did not learn from.
    """
    return [
        *_ending(step, total_steps, early, here, whole),
        *_figures(results, best_step),
        *_rollouts(results),
        "all weights are finite"
        + (f"; {counted(skipped, 'non-finite step')} {was(skipped)} skipped" if skipped else ""),
        *([f"went back to a checkpoint {times(rollbacks)}: see rollbacks.json"] if rollbacks else []),
        "",
        f"left in {run}:",
        *files_left(run),
        "",
        "next:",
        *(f"  {command}" for _, command in next_commands(run, prompt, texts, scores, held_out)),
    ]


def stopped(run: Path, *, step: int, total_steps: int, command: Sequence[str]) -> list[str]:
    """command: what the user typed, with --resume, as separate words; none for a run started from Python."""
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
) -> list[tuple[str, str]]:
    """(what for, command).

    texts: the model continues the prompt as it is, and there is nothing to chat about.
    scores: a reward model, which writes nothing and is measured on the pairs that the run held out, if any.
    """
    folder, words = shlex.quote(str(run)), shlex.quote(prompt)
    verify = ("check every file", f"surefoot verify {folder}")
    if scores:
        measure = [("measure it on the pairs held out", f"surefoot evaluate reward {folder}")] if held_out else []
        return [*measure, verify]
    if texts:
        return [("let it go on", f"surefoot generate {folder} --raw --prompt {words}"), verify]
    return [
        ("talk to it", f"surefoot chat {folder}"),
        ("ask one question", f"surefoot generate {folder} --prompt {words}"),
        verify,
    ]


def resume_command(typed: Sequence[str]) -> list[str]:
    """The words that continue a run: what was typed, with --resume in place of --overwrite. What stands behind `--` is
    another tool's."""
    if not typed:
        return []
    end = typed.index("--") if "--" in typed else len(typed)
    kept = [word for word in typed[:end] if word not in {"--overwrite", "--resume"}]
    return [*kept, "--resume", *typed[end:]]


def files_left(run: Path) -> list[str]:
    """The files and folders worth opening, those that exist, with size and purpose."""
    there = [(run / name, purpose) for name, purpose in _FILES if (run / name).exists()]
    found = [(f"{path.name}/" if path.is_dir() else path.name, _size(path), purpose) for path, purpose in there]
    width = max((len(name) for name, _, _ in found), default=0)
    return [f"  {name:<{width}}  {size_text(size):>9}  {purpose}" for name, size, purpose in found]


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file()) if path.is_dir() else path.stat().st_size


def time_breakdown(seconds: Mapping[str, float]) -> str:
    """`41 s: 20 s in steps, 12 s set-up, 5.0 s evaluation`: all of it, and what took most; the rest is `other`."""
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
        first = f"stopped at step {step} of {total_steps}, as evaluation no longer improves"
    again = [] if here == whole else [f"this start: {time_breakdown(here)}"]
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
    figures = [form.format(results[key]) for key, form in known.items() if results.get(key) is not None]
    best = [f"best checkpoint-{best_step}"] if best_step is not None else []
    return [" · ".join(figures + best)] if figures or best else []


def _rollouts(results: Mapping[str, object]) -> list[str]:
    """Of stage ppo, whose loss says little."""
    forms = tuple(zip(ROLLOUT, ("reward {:.4g}", "KL {:.3g}", "{:.1f} tokens per answer"), strict=True))
    return [
        f"{when} rollout: " + " · ".join(form.format(results[f"train_{when}_{name}"]) for name, form in forms)
        for when in ("first", "last")
        if f"train_{when}_{ROLLOUT[0]}" in results
    ]
