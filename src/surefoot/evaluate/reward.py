"""`surefoot evaluate reward`: how well a reward model ranks pairs of answers, and how well calibrated it is.

The data is prepared as in training, so the numbers for a run and its evaluation file equal the run's own evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data.audit import Audit
from surefoot.data.batching.loader import all_pairs, with_progress
from surefoot.evaluate.loss import (
    as_the_run_evaluates,
    evaluation_settings,
    held_out_data,
    progress,
    read_evaluation_data,
)
from surefoot.methods.losses.reward import reward_objective
from surefoot.methods.open_reward import OpenReward
from surefoot.methods.provenance import saved_config
from surefoot.methods.requests import DataRequest
from surefoot.methods.reward import Ranking
from surefoot.report.calibration import CALIBRATION, calibration_bins, calibration_error
from surefoot.report.trainer_log import finite
from surefoot.system.errors import Fault, InputError
from surefoot.training.evaluation import evaluate_loss
from surefoot.training.report import EvalReport


@dataclass(frozen=True)
class MeasuredReward:
    """How a reward model ranked pairs.

    loss: the run's `reward.loss`.
    audit: of the data.
    """

    report: EvalReport
    loss: str
    audit: Audit
    template: str
    max_length: int

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.report.metrics["reward_accuracy"], self.report.weight)

    @property
    def sums(self) -> Sequence[Sequence[float]]:
        """[BINS][pairs, right, confidence], see `calibration_sums`."""
        return self.report.tables[CALIBRATION]


def measure_reward(
    scorer: OpenReward,
    request: DataRequest | None,
    *,
    pairs: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> MeasuredReward:
    """Score the pairs with the run's own loss.

    request: None takes the run's held-out pairs.
    pairs: per forward pass; None takes the run's micro-batch.
    on_progress: called with progress messages.

    Raises InputError for anything wrong with the data, before the model runs.
    """
    opened = scorer.opened
    if request is None:
        config = saved_config(opened.trained)
        held_out = held_out_data(opened) if config and config.method.scores else None
        if held_out is None:
            what = "is needed, because MODEL is not a run with held-out pairs"
            raise InputError(Fault("DATA", what, "name preference records", code="SF-USE-FLAG"))
        data, max_length = held_out, opened.tokens.max_length.value
    else:
        data, max_length = read_evaluation_data(opened, request, stage="reward")
    plan = opened.plan
    planned = plan.reward if plan else None
    # Reward models of other tools name no loss; their score is read at the last token.
    loss = planned.loss.value if planned else "last"
    device = scorer.model.v_head.summary.weight.device
    objective = reward_objective(loss)
    if planned:
        objective = reward_objective(loss, center=planned.center, surplus=planned.surplus)
    with as_the_run_evaluates(opened, data, pairs) as layout:
        report = evaluate_loss(
            scorer.model,
            objective,
            with_progress(all_pairs(data.train, layout), progress(on_progress, "", len(data.train) // 2, "pairs")),
            step=0,
            settings=evaluation_settings(opened),
            device=device,
            unit="pairs",
        )
    assert report is not None
    return MeasuredReward(report, loss, data.audit, data.template.name, max_length)


def reward_to_json(measured: MeasuredReward) -> dict[str, Any]:
    """JSON values; a non-finite number is null."""
    audit, report = measured.audit, measured.report
    metrics = report.metrics
    return {
        "data": {
            "file": audit.source.file,
            "sha256": audit.source.sha256,
            "records": audit.source.used,
            "pairs": report.weight,
            "cut": audit.truncated,
            "without_answers": len(audit.source.dropped),
        },
        "template": measured.template,
        "max_length": measured.max_length,
        "accuracy": measured.ranking.accuracy,
        "accuracy_interval": list(measured.ranking.interval),
        "margin": finite(metrics["reward_margin"]),
        "score_chosen": finite(metrics["reward_chosen"]),
        "score_rejected": finite(metrics["reward_rejected"]),
        "loss": {"kind": measured.loss, "value": finite(report.loss)},
        "calibration": {
            "expected_error": finite(calibration_error(measured.sums)),
            "bins": [vars(one) for one in calibration_bins(measured.sums)],
        },
        "seconds": report.seconds,
    }
