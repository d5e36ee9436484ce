"""What a checkpoint belongs to: hashes of config, data, tokenizer, template and base model, and the environment.

Another data file or base model under the same name is refused on resume (exit 4). Another library version or thread
count only ends the promise of bit-equality, and that is said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot.config.load import dump_config
from surefoot.config.schema import RunConfig
from surefoot.data.prepare import PreparedData
from surefoot.models.folder import base_fingerprint, resolve_folder
from surefoot.planning.plan import RunPlan
from surefoot.planning.reference import ADAPTER_OFF, CACHED, MODEL, NONE
from surefoot.runs.run_folder import saved_identity
from surefoot.system import hardware
from surefoot.system.errors import Fault, IntegrityError
from surefoot.training.checkpoint import Checkpoint

_MUST_MATCH = {
    "data": "the training data is not what it was",
    "tokenizer": "the tokenizer files are not what they were",
    "template": "the chat template is not what it was",
    "base": "the base model is not what it was",
    "reference": "the model of alignment.reference is not what it was",
    "reward": "the model of ppo.reward is not what it was",
    "critic": "the model that the critic began as is not what it was, and the critic's adapter lies over it",
}
_OF_THE_BASE = (NONE, ADAPTER_OFF, MODEL, CACHED)  # references that are the base itself


def run_identity(
    config: RunConfig, plan: RunPlan, base: Path, data: PreparedData, objective: str | None
) -> dict[str, Any]:
    """JSON-able; goes into every manifest. objective: name of a Python caller's loss, None for the stage's own."""
    return {
        "objective": objective,
        "config": hashlib.sha256(dump_config(config).encode()).hexdigest(),
        "data": data.audit.source.content,
        "eval_data": data.eval_audit.source.content if data.eval_audit else None,
        "tokenizer": data.tokenizer_sha256,
        "template": hashlib.sha256(data.template.identity.encode()).hexdigest(),
        "eval_template": hashlib.sha256(data.eval_template.identity.encode()).hexdigest()
        if data.eval_template
        else None,
        "base": base_fingerprint(base),
        "reference": _reference_fingerprint(plan),
        **_scored_fingerprints(config, plan),
        "versions": hardware.versions(),
        "threads": plan.threads.value,
        "device": plan.device.value,
        "ranks": plan.parallel.ranks.value,
        "engine": plan.parallel.engine.value,
    }


def _reference_fingerprint(plan: RunPlan) -> str | None:
    """Of a reference that is another model or adapter."""
    chosen = plan.reference.value if plan.reference else NONE
    return None if chosen in _OF_THE_BASE else base_fingerprint(resolve_folder(chosen, None, weights=True))


def _scored_fingerprints(config: RunConfig, plan: RunPlan) -> dict[str, str]:
    if plan.ppo is None:
        return {}
    from surefoot.methods.ppo.models import fingerprints

    return fingerprints(config, plan.ppo)


def require_base(checkpoint: Checkpoint, base: Path) -> None:
    """Before anything of another model, such as its tokenizer, is found not to fit. Raises IntegrityError."""
    then = saved_identity(checkpoint).get("base")
    if then not in (None, base_fingerprint(base)):
        what = f"is not the base model of {checkpoint.folder}: {_MUST_MATCH['base']}"
        raise IntegrityError(
            Fault(str(base), what, "name the old one as model, or start another run", code="SF-RESUME-CHANGED")
        )


def check_identity(checkpoint: Checkpoint, now: dict[str, Any], others: Sequence[str] = ()) -> list[str]:
    """Cautions about a changed environment. others: what else is computed in another way from here on. Raises
    IntegrityError where data, tokenizer or base changed."""
    then = saved_identity(checkpoint)
    faults = [
        Fault(str(checkpoint.folder), what, "restore it, or start another run", code="SF-RESUME-CHANGED")
        for key, what in _MUST_MATCH.items()
        if then.get(key, now.get(key)) != now.get(key)  # an older version's checkpoint may lack one
    ]
    if then.get("objective") != now["objective"]:
        losses = [name or "the stage's own" for name in (then.get("objective"), now["objective"])]
        what = f"it was trained with another loss: {losses[0]}, not {losses[1]}"
        faults.append(
            Fault(
                str(checkpoint.folder), what, "resume it from Python with the same objective", code="SF-RESUME-CHANGED"
            )
        )
    if faults:
        raise IntegrityError(faults)
    changed = [
        f"{name} was {then['versions'].get(name)}, is {now['versions'].get(name)}"
        for name in sorted({*then["versions"], *now["versions"]})
        if then["versions"].get(name) != now["versions"].get(name)
    ]
    changed += [f"{key} was {then[key]}, is {now[key]}" for key in ("threads", "device") if then[key] != now[key]]
    changed += [
        f"{key} {'were' if key == 'ranks' else 'was'} {before}, {'are' if key == 'ranks' else 'is'} {now[key]}"
        for key, usual in (("ranks", 1), ("engine", "single"))
        if (before := then.get(key, usual)) != now[key]
    ]
    cautions = [f"continuing, but not bit for bit: {change}" for change in [*changed, *others]]
    if then["eval_data"] != now["eval_data"]:
        cautions.append("the evaluation data is not what it was: evaluation losses before and after cannot be compared")
    if then.get("eval_template", now["eval_template"]) != now["eval_template"]:
        what = "the template of the evaluation data is not what it was"
        cautions.append(f"{what}: evaluation losses before and after cannot be compared")
    return cautions
