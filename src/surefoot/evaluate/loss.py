"""`surefoot evaluate loss`: loss, perplexity and token accuracy on data that the model may never have seen.

The data is prepared as in training: same sources, formats, template, label mask and truncation. The model computes as
in
the evaluations of its run: with packed rows and a chunked output head if the run's plan says so. So the number for a
    run and its evaluation file equals the run's eval_loss. On another device, with data longer than a family's window,
    or with a model that a fast path does not fit, rows are padded and the model's own head is used; the numbers then
    agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from surefoot.data.audit import Audit
from surefoot.data.batching.loader import Layout, all_example_batches, with_progress
from surefoot.data.prepare import PreparedData
from surefoot.evaluate.side_by_side import Only, sides
from surefoot.families.templates import OWN, is_users_own
from surefoot.methods.examples import prepare_examples, whole_layout
from surefoot.methods.losses.sft import sft_loss
from surefoot.methods.open_model import OpenModel
from surefoot.methods.provenance import saved_config
from surefoot.methods.requests import DataRequest, config_for, require_positions, words_of_the_command
from surefoot.models.attention import decoding_context
from surefoot.models.facts import facts_of
from surefoot.models.fast import FastPath
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.packing import packed_attention
from surefoot.models.precision import autocast
from surefoot.planning.attention import mask_reason
from surefoot.planning.fast_paths import head_rows
from surefoot.planning.packing import without_packing
from surefoot.planning.plan import PLAIN, Choice, TokenizerPlan
from surefoot.report.trainer_log import finite
from surefoot.runs.revisions import pin, saved_commits
from surefoot.runs.run_folder import DATA
from surefoot.system.errors import Fault, InputError
from surefoot.system.folders import run_of
from surefoot.training.evaluation import evaluate_loss
from surefoot.training.report import EvalReport
from surefoot.training.step import StepSettings


@dataclass(frozen=True)
class MeasuredLoss:
    """Losses of every side on one data set.

    results: by side, the base first.
    audit: of the data.
    template, max_length: as used.
    """

    results: Mapping[str, EvalReport]
    audit: Audit
    template: str
    max_length: int


def read_evaluation_data(
    opened: OpenModel, request: DataRequest, *, any_layout: bool = False, stage: str | None = None
) -> tuple[PreparedData, int]:
    """Return the examples (as `train`) and the maximum length of one in tokens.

    any_layout: format data that the run's template cannot format, such as plain text, as a new run would, instead of
        refusing it; for measurements that only need a text.
    stage: stage to read the records for; None reads answers, or texts if the run learned texts.
    """
    run = saved_config(opened.trained)
    stage = stage or (run.stage if run and run.method.plain_texts else "sft")
    config = config_for(
        request,
        str(opened.base),
        template=request.template or ("auto" if any_layout else _own_template(opened)),
        stage=stage,
        train_on=run.data.train_on if run else "responses",
        encoding=run.data.encoding if run else "parts",
        max_pixels=run.data.max_pixels if run else None,
    )
    tokens = tokens_for(opened, request)
    with words_of_the_command():
        return prepare_examples(config, tokens, opened.tokenizer), tokens.max_length.value


def without_pictures(data: PreparedData) -> PreparedData:
    """Return the data, for code that gives the model only token ids. Raises InputError for examples with pictures."""
    if data.audit.pictures:
        what = f"has {data.audit.pictures:,} pictures, but this measurement uses only text"
        raise InputError(Fault(data.audit.source.file, what, "name data without pictures", code="SF-DATA-PICTURE"))
    return data


def held_out_data(opened: OpenModel) -> PreparedData | None:
    """The run's held-out data as training data; None if `opened` is not a run that held data out."""
    config, run = saved_config(opened.trained), run_of(opened.trained)
    if config is None or run is None or config.data.eval == "none":
        return None
    pinned, _ = pin(config, saved_commits(run / DATA))
    data = prepare_examples(pinned, opened.tokens, opened.tokenizer)
    assert data.eval is not None
    assert data.eval_audit is not None
    assert data.eval_template is not None
    return replace(data, train=data.eval, audit=data.eval_audit, template=data.eval_template)


def measure_loss(
    opened: OpenModel,
    request: DataRequest,
    *,
    rows: int | None = None,
    only: Only | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> MeasuredLoss:
    """Measure the mean loss per supervised token, of the base and of the adapter.

    rows: examples per forward pass; None takes the run's micro-batch.
    on_progress: called with progress messages.

    Raises InputError for anything wrong with the data, before the model runs.
    """
    compared = sides(opened, only)
    data, max_length = read_evaluation_data(opened, request)
    device = next(opened.model.parameters()).device
    results = {}
    with as_the_run_evaluates(opened, data, rows) as layout:
        for side in compared:
            report_progress = progress(on_progress, f"{side.name}: ", len(data.train), "examples")
            with side.entered():
                report = evaluate_loss(
                    opened.model,
                    sft_loss,
                    with_progress(all_example_batches(data.train, layout), report_progress),
                    step=0,
                    settings=evaluation_settings(opened),
                    device=device,
                )
            assert report is not None
            results[side.name] = report
    return MeasuredLoss(results, data.audit, data.template.name, max_length)


def progress(on_progress: Callable[[str], None], of: str, total: int, unit: str) -> Callable[[int], None]:
    """Return a callback that reports how many are done."""
    return lambda done: on_progress(f"{of}{done:,} of {total:,} {unit}")


def evaluation_settings(opened: OpenModel) -> StepSettings:
    return StepSettings(0, None, forward=as_evaluated(opened).context, kernels=decoding_context)


def as_evaluated(opened: OpenModel) -> OpenModel:
    """Return the model computing as in the evaluations of its run; unchanged if there was none on such a device."""
    device = next(opened.model.parameters()).device
    plan = opened.plan
    if plan is None or plan.device.value != device.type:
        return opened
    compute = plan.precision.compute.value
    said = compute == "fp32" or compute in opened.held
    held = opened.held if said else f"{opened.held} with products in {compute}"
    return replace(opened, context=lambda: autocast(plan.precision, device), held=held)


def _own_template(opened: OpenModel) -> str:
    """Refuse any template but the run's own, which its evaluation used."""
    if opened.plan is None:
        return "auto"
    name = opened.tokens.dialogues or opened.tokens.template.value
    return OWN if is_users_own(name) else name


def tokens_for(opened: OpenModel, request: DataRequest) -> TokenizerPlan:
    """How the model's tokenizer is used, with the template and length that are asked for."""
    tokens = opened.tokens
    if is_users_own(tokens.template.value) and request.template is None:
        tokens = replace(tokens, template=replace(tokens.template, value=OWN))
    if request.template not in (None, "auto"):
        chosen: Choice[str] = Choice(str(request.template), "asked for", "user")
        tokens = replace(tokens, template=chosen, dialogues="", fallbacks=())
    if request.max_length is not None:
        require_positions("--max-length", request.max_length, opened.positions)
        tokens = replace(tokens, max_length=Choice(request.max_length, "asked for", "user"))
    return tokens


def loss_to_json(measured: MeasuredLoss) -> dict[str, Any]:
    """JSON values; a non-finite number is null."""
    audit = measured.audit
    return {
        "data": {
            "file": audit.source.file,
            "sha256": audit.source.sha256,
            "records": audit.source.used,
            "examples": audit.kept,
            "supervised_tokens": audit.supervised_tokens,
            "cut": audit.truncated,
            "without_label": len(audit.source.dropped),
        },
        "template": measured.template,
        "max_length": measured.max_length,
        "results": {
            name: {
                "loss": finite(report.loss),
                "perplexity": finite(report.perplexity),
                "token_accuracy": report.accuracy,
                "supervised_tokens": report.weight,
                "seconds": report.seconds,
            }
            for name, report in measured.results.items()
        },
    }


ROWS = 8  # examples or pairs per forward pass without a run's micro-batch size


@contextmanager
def as_the_run_evaluates(opened: OpenModel, data: PreparedData, most: int | None) -> Iterator[Layout]:
    """Context manager: prepare the model for micro-batches of `data.train` in the yielded layout.

    most: examples or pairs per micro-batch; None: as in the run.
    """
    plan = opened.plan
    with ExitStack() as undone:
        if plan is None:
            yield Layout(opened.pad_id, most=most or ROWS)
            return
        here = plan.device.value == next(opened.model.parameters()).device.type
        if plan.kernels.loss.value != PLAIN:
            _put_in(undone, loss_path(head_rows(trains=False)), opened.model)
        if (form := plan.kernels.documents.value) != PLAIN:
            longest = int(data.train.lengths.max())
            pictures = any(file.pictures for file in data.train.files)
            fits = here and not pictures and not mask_reason(facts_of(opened.base).window, longest)
            if not (fits and _put_in(undone, packed_attention(form), opened.model)):
                plan = without_packing(plan, "cannot be used here", "hardware")
        layout = whole_layout(plan, data)
        yield layout if most is None else replace(layout, most=most, tokens=None)


def _put_in(undone: ExitStack, path: FastPath, model: nn.Module) -> bool:
    if path.obstacle(model):
        return False
    undone.callback(path.install(model))
    return True
