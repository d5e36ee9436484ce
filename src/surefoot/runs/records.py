"""What a run writes about itself before step 1: config, plan, environment, data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.config.load import dump_config
from surefoot.config.schema import RunConfig
from surefoot.interop.account import to_json
from surefoot.interop.translation import Translation
from surefoot.planning.plan import RunPlan
from surefoot.planning.serial import plan_to_json
from surefoot.system import durable, hardware
from surefoot.system.made_folders import CONFIG, PLAN
from surefoot.system.made_folders import MANIFEST

ENVIRONMENT = "environment.json"
DATA = "data.json"
ORIGIN = "training_args.json"


def write_records(
    config: RunConfig,
    run: Path,
    plan: RunPlan,
    verified: Mapping[str, Any],
    data: Mapping[str, Any],
    origin: Translation | None = None,
    ranks: Sequence[Mapping[str, Any]] = (),
) -> None:
    """config.yaml re-runs the run; plan.json holds every choice and what was verified; data.json the audit.
    training_args.json holds the words of another tool that the config came from; one that is there stays.

    ranks: of each its engine and how many elements it holds.

    The plan comes first: by it a folder is known as a run. The manifest of an outcome that this run goes beyond goes.
    """
    durable.remove(run / MANIFEST)
    durable.write_json(run / PLAN, {"plan": plan_to_json(plan), "verified": verified})
    durable.write_text(run / CONFIG, dump_config(config))
    durable.write_json(run / ENVIRONMENT, hardware.describe() | ({"ranks": list(ranks)} if ranks else {}))
    durable.write_json(run / DATA, data)
    if origin is not None:
        durable.write_json(run / ORIGIN, to_json(origin))
