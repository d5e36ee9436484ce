"""`surefoot evaluate answers`: answers to prompts, scored by the rewards of stage grpo."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from surefoot.commands.options import (
    argument_or_option,
    check_models,
    claim_out,
    findings_options,
    introduce,
    load_or_exit,
    model_options,
    only_option,
)
from surefoot.commands.terminal import echo, echo_json, screen
from surefoot.method_facts.losses import GROUP_LOSSES
from surefoot.system.errors import Fault, InputError

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig

_FINDINGS, _ANSWERS, _BEST, _PAIRS = "answers.json", "answers.jsonl", "best.jsonl", "pairs.jsonl"
_COUNT = 8


@click.command()
@model_options
@argument_or_option("data", "Prompts as in data.train.  [default: those that the config holds out]")
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Config of stage grpo with rewards, sampling and data.  [default: the run's own]",
)
@click.option(
    "--answers",
    "count",
    type=click.IntRange(min=1),
    help=f"Answers drawn to each prompt.  [default: grpo.eval_answers, or {_COUNT}]",
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the draws.  [default: the config's]")
@click.option("--max-samples", type=click.IntRange(min=1), help="Use only the first N prompts.")
@click.option("--best", is_flag=True, help=f"Write the best answer to each prompt as training data: OUT/{_BEST}.")
@click.option("--pairs", is_flag=True, help=f"Write the best and worst answer to each prompt: OUT/{_PAIRS}.")
@only_option
@findings_options(f"{_FINDINGS} and {_ANSWERS}")
def answers(
    model: str,
    adapter: str | None,
    data: str | None,
    file: Path | None,
    count: int | None,
    seed: int | None,
    max_samples: int | None,
    best: bool,
    pairs: bool,
    only: str | None,
    as_json: bool,
    out: Path | None,
    overwrite: bool,
) -> None:
    """Measure the reward of MODEL's answers to prompts, and pass@k: the chance that one of k drawn answers scores at
    least grpo.eval_passes. For a run of stage grpo and its held-out prompts the numbers equal the run's own.

    --best writes the best answer to each prompt that scores as much, in a format that stage sft reads; --pairs the best
    and the worst answer, in one that stage dpo reads.
    """
    from surefoot.methods.requests import sources_of
    from surefoot.system import durable
    from surefoot.system.folders import run_of

    flag = "--best" if best else "--pairs" if pairs else ""
    if flag and out is None:
        raise click.UsageError(f"{flag} needs --out")
    check_models(model, adapter, only=only)
    config = _grpo_config(model, adapter, file)
    if not config.grpo.rewards and config.grpo.environment is None:
        what = "names no reward (one that was passed from Python is in no config)"
        raise InputError(Fault("grpo.rewards", what, "name them in a config, and that with --config", code="SF-REWARD"))
    if data is not None:
        named = config.data.model_copy(update={"train": sources_of(data), "eval": "none", "max_samples": None})
        config = config.model_copy(update={"data": named})
    elif config.data.eval == "none":
        what = "is needed, because the config holds no prompts out"
        raise InputError(Fault("DATA", what, "name prompts as in data.train", code="SF-USE-FLAG"))
    count = count or config.grpo.eval_answers or _COUNT
    if pairs and count == 1:
        what = "compares answers to one prompt, and one is drawn"
        raise InputError(Fault("--pairs", what, "draw more with --answers", code="SF-USE-FLAG"))
    seed = config.seed if seed is None else seed
    request = {
        "model": model,
        "adapter": adapter,
        "source": data,
        "config": None if file is None else str(file),
        "settings": config.grpo.model_dump(mode="json"),
        "answers": count,
        "seed": seed,
        "max_samples": max_samples,
        "best": best,
        "only": only,
        **({"pairs": True} if pairs else {}),  # omitted if unset, as in earlier versions
    }
    if out is not None:
        from surefoot.system.folders import require_own_files

        claim_out(out / _FINDINGS, request, overwrite)
        require_own_files(out / _FINDINGS, [_ANSWERS, *([_BEST] if best else []), *([_PAIRS] if pairs else [])])

    from surefoot.evaluate.answers import (
        AnswersRequest,
        answers_to_json,
        best_records,
        measure_answers,
        pair_records,
        require_records,
    )
    from surefoot.evaluate.loss import as_evaluated
    from surefoot.methods.open_model import open_for_use
    from surefoot.report.record import brought_in_python
    from surefoot.report.tables.evaluation import answers_lines, answers_table

    if flag:
        require_records(config, flag)
    opened = as_evaluated(open_for_use(model, adapter))
    introduce(opened, f"scored by {_scorers(config)}")
    if file is None and (run := run_of(opened.trained)) and "reward" in brought_in_python(run):
        what = "the run also had the scores of a function that was passed from Python, which is in no config"
        echo(f"caution: {what}: these numbers are without it, and not the run's own", err=True)
    asked = AnswersRequest(config, data is None, count, seed, max_samples)
    with screen(err=True).passing() as show:
        measured = measure_answers(
            opened,
            asked,
            only=only,  # pyright: ignore[reportArgumentType]
            notify=lambda sentence, *, caution=True: echo(sentence, err=True),
            on_progress=show,
        )
    found = {"model": model, "adapter": adapter, "opened": opened.described, **answers_to_json(measured, asked)}
    if out is not None:
        written = {
            _ANSWERS: _lines({"side": side, **one} for side, own in measured.results.items() for one in own.kept)
        }
        if best:
            written[_BEST] = _lines(best_records(measured, config.grpo.eval_passes))
            found["best"] = written[_BEST].count(b"\n")
        if pairs:
            written[_PAIRS] = _lines(pair_records(measured))
            found["pairs"] = written[_PAIRS].count(b"\n")
        files = {name: hashlib.sha256(content).hexdigest() for name, content in written.items()}
        from surefoot.system.folders import own_files

        durable.make_folders(out)
        for old in own_files(out / _FINDINGS):
            durable.remove(old)
        durable.write_json(out / _FINDINGS, {"asked": request, "files": files, **found})
        for name, content in written.items():
            durable.write_bytes(out / name, content)
    if as_json:
        echo_json(found)
        return
    console = screen()
    for line in answers_lines(found):
        console.say(line)
    console.show(answers_table(found["results"]))
    if best and out is not None:
        console.say(f"{out / _BEST}: the best answers to {found['best']:,} of {len(measured.prompts):,} prompts")
    if pairs and out is not None:
        console.say(f"{out / _PAIRS}: pairs of answers to {found['pairs']:,} of {len(measured.prompts):,} prompts")


def _grpo_config(model: str, adapter: str | None, file: Path | None) -> RunConfig:
    """Raises InputError for a model that is no run of stage grpo, without a file, and for another stage in the file."""
    if file is not None:
        config = load_or_exit(file).config
        if config.method.losses is not GROUP_LOSSES:
            what = f"is a config of stage {config.stage}"
            raise InputError(Fault("--config", what, "name one of stage grpo", code="SF-USE-FLAG"))
        return config
    from surefoot.methods.provenance import saved_config
    from surefoot.models.folder import resolve_folder

    config = saved_config(resolve_folder(adapter or model, weights=True))
    if config is None or config.method.losses is not GROUP_LOSSES:
        what = f"is needed, because {adapter or model} is not a run of stage grpo"
        raise InputError(Fault("--config", what, "name a config of stage grpo with rewards", code="SF-USE-FLAG"))
    return config


def _scorers(config: RunConfig) -> str:
    named = [term.name for term in config.grpo.rewards]
    return ", ".join([*([config.grpo.environment.name] if config.grpo.environment else []), *named])


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows).encode()
