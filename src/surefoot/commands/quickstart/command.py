"""`surefoot quickstart`: ask a tiny model questions, fine-tune it offline with `train_run`, and ask again.

The questions are stored next to the run folder, because a run folder must be empty when a run begins.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from surefoot.commands.quickstart.world import CHANCE, Record, base_folder, instructions, museum, write_data
from surefoot.commands.terminal import screen
from surefoot.commands.train import chosen_mode
from surefoot.config.schema import (
    AdapterConfig,
    BatchConfig,
    CheckpointConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from surefoot.config.sections import DataConfig, SourceConfig
from surefoot.config.types import Duration

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from surefoot.commands.quickstart.score import Score
    from surefoot.report.console import Console
    from surefoot.runs.output_folder import Mode


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs/quickstart"), show_default=True, help="Run folder."
)
@click.option(
    "--adapter",
    type=click.Choice(["lora", "dora", "full"]),
    default="lora",
    show_default=True,
    help="What to train: an adapter or all weights.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=42, show_default=True, help="Seed for the rooms and questions."
)
@click.option("--resume", is_flag=True, help="Continue a quickstart that was stopped.")
@click.option("--overwrite", is_flag=True, help="Replace the run in the output folder.")
def quickstart(out: Path, adapter: Any, seed: int, resume: bool, overwrite: bool) -> int:
    """Fine-tune a tiny model that comes with surefoot, and ask it the same questions before and after.

    Downloads nothing. The result is a normal run folder: chat with it, verify it, train it again.
    """
    typed = ["surefoot", *sys.argv[1:]]
    return run_quickstart(out, adapter, chosen_mode(resume, overwrite) or "new", seed, screen(), typed)


Kind = Literal["lora", "dora", "full"]

_PEAK_LR = {"lora": 3e-3, "dora": 3e-3, "full": 1e-3}
_EXAMPLES = 3  # questions shown with the answers before and after


def run_quickstart(output: Path, kind: Kind, mode: Mode, seed: int, console: Console, typed: Sequence[str]) -> int:
    """Train in `output`, print and record the accuracy before and after; return the exit code of the run.

    typed: argv of the command line, for the resume hint.
    """
    from surefoot.commands.quickstart.score import score
    from surefoot.methods.open_model import open_for_use
    from surefoot.runs.run import RunOptions, train_run
    from surefoot.runs.run_folder import inspect_folder

    questions = output.with_name(f"{output.name}-data")
    config = quickstart_config(output, questions, kind, seed)
    inspect_folder(config, mode)  # refuse a non-empty folder before anything is written or loaded
    write_data(questions, seed)
    _, held_out = instructions(seed)
    console.say(_story(questions, seed))
    opened = open_for_use(config.model.path)
    before = score(opened.model, opened, held_out)
    console.say(f"before training: {before.accuracy:.1%} correct; guessing gives {CHANCE:.1%}\n")

    trained: list[Score] = []  # stays empty if --resume finds a finished run

    def figures(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, Any]:
        after = score(model, opened, held_out)
        trained.append(after)
        console.say(_comparison(held_out, before, after))
        return {
            "accuracy_before": before.accuracy,
            "accuracy_after": after.accuracy,
            "chance": CHANCE,
            "exact_before": before.exact,
            "exact_after": after.exact,
        }

    options = RunOptions(typed, figures=figures, prompt="Where is the owl?")
    code = train_run(config, mode, console, options)
    if trained:
        run = shlex.quote(str(output))
        console.say(f"  surefoot train {run}/config.yaml output={run}-again batch.size=16")
    return code


def quickstart_config(output: Path, questions: Path, kind: Kind, seed: int) -> RunConfig:
    """questions: the folder filled by `write_data`."""
    return RunConfig(
        stage="sft",
        model=ModelConfig(path=str(base_folder())),
        adapter=None if kind == "full" else AdapterConfig(kind=kind, rank=16, alpha=32),
        data=DataConfig(
            train=(SourceConfig(path=str(questions / f"train-{seed}.json")),),
            eval=(SourceConfig(path=str(questions / f"held-out-{seed}.json")),),
            format="alpaca",
            max_length=64,
        ),
        batch=BatchConfig(size=32),
        optim=OptimConfig(lr=_PEAK_LR[kind], warmup=0.05),
        duration=Duration(4, "epochs"),
        log_every=4,
        eval_every=Duration(1, "epochs"),
        checkpoint=CheckpointConfig(every=Duration(2, "epochs"), keep=2, best="none"),
        output=str(output),
        seed=seed,
    )


def _story(questions: Path, seed: int) -> str:
    rooms = [f"{group} -> {colour}" for group, colour in museum(seed).items()]
    return (
        "A model with a million parameters has read that a heron is a bird and an oboe an instrument. Training tells\n"
        "it where some of these things are in a museum, but not why. The rule that it has to discover:\n"
        f"  {', '.join(rooms[:4])},\n  {', '.join(rooms[4:])}\n"
        f"questions and answers: {questions}\n"
        "held-out questions are about things that no training question mentions; how many does it answer correctly?"
    )


def _comparison(held_out: Sequence[Record], before: Score, after: Score) -> str:
    rows = [
        ("", "before", "after", "guessing"),
        ("right room (of eight)", f"{before.accuracy:.1%}", f"{after.accuracy:.1%}", f"{CHANCE:.1%}"),
        ("exact answer written", f"{before.exact:.1%}", f"{after.exact:.1%}", ""),
    ]
    lines = ["", f"accuracy on {len(held_out)} held-out questions:"]
    lines += [f"  {name:<24}  {first:>7}  {second:>7}  {third:>8}".rstrip() for name, first, second, third in rows]
    for record, old, new in list(zip(held_out, before.written, after.written, strict=True))[:_EXAMPLES]:
        question = " ".join(part for part in (record["instruction"], record["input"]) if part)
        lines += ["", f"  {question}", f"    before:  {old.strip()}", f"    after:   {new.strip()}"]
    return "\n".join([*lines, ""])
