"""What a row's `back` is made of: from a surefoot config to the value of one setting of another tool.

    joint("bf16", False, ("precision.compute",), back=equals("precision.compute", "bf16"))
    joint("optim", "adamw_torch_fused", ("optim.name",), back=reverse("optim.name", OPTIMIZERS))

A value that a tool cannot express needs no care here: `surefoot.interop.export` translates the result and tells what
has changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from surefoot.config.dump import plain_config
from surefoot.config.sections import PATTERN
from surefoot.config.types import Duration
from surefoot.interop.launch import Options

if TYPE_CHECKING:
    from surefoot.config.schema import RunConfig

Sources = list[dict[str, Any]]


class Ours:
    """A surefoot config by dotted keys; None for a key in a section that is not there.

    folder: where the other tool's config is written.
    formats: path of a source with format auto -> its format, where the file could be read.
    options: what of the run's files may be read.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: str = ".",
        formats: Mapping[str, str] | None = None,
        options: Options | None = None,
    ):
        self.plain, self.facts = plain_config(config), config.method
        self.folder, self.options = folder, options or Options()
        self.train = self._sources(self.plain["data"]["train"], formats or {}, self["data.max_samples"])
        held = self.plain["data"]["eval"]
        self.eval = [] if held == "none" or isinstance(held, int | float) else self._sources(held, formats or {})

    def __getitem__(self, key: str) -> Any:
        value: Any = self.plain
        for step in key.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        return value

    def record(self, path: str) -> Mapping[str, Any] | None:
        """Return the first record of a source, None if it cannot be read."""
        return self.options.first(path)

    @property
    def sees(self) -> bool:
        """Whether pictures are trained on, as far as the config and the first records tell."""
        records = [self.record(source["path"]) for source in self.train]
        told = self["vision.tower"] in ("trained", "adapter") or self["data.max_pixels"] is not None
        return told or any(record and (record.get("images") or _pictured(record)) for record in records)

    @property
    def evaluates(self) -> bool:
        return self["data.eval"] != "none"

    @property
    def only(self) -> dict[str, Any]:
        """The only training source; the first of several."""
        return self.train[0]

    def _sources(self, value: Any, formats: Mapping[str, str], limit: int | None = None) -> Sources:
        listed: Sources = [{"path": one} if isinstance(one, str) else dict(one) for one in _items(value)]
        usual = self["data.format"]
        for source in listed:
            chosen = source.get("format", usual)
            source["format"] = formats.get(str(source["path"]), "auto") if chosen == "auto" else chosen
            if limit is not None:
                source.setdefault("max_samples", limit)
        return listed


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _pictured(value: Any) -> bool:
    """Whether there is a picture among the parts of a message."""
    if isinstance(value, Mapping):
        return value.get("type") in ("image", "image_url") or any(map(_pictured, value.values()))
    return isinstance(value, list) and any(map(_pictured, value))


Back = Callable[[Ours], Any]


def never(ours: Ours) -> Any:
    """Leave the setting out: another one says it."""
    return None


def equals(key: str, *values: Any) -> Back:
    """Whether the key has one of the values."""
    return lambda ours: ours[key] in values


def true_if(key: str, *values: Any) -> Back:
    """True where the key has one of the values, else nothing."""
    return lambda ours: True if ours[key] in values else None


def differs(key: str, *values: Any) -> Back:
    """Whether the key has none of the values."""
    return lambda ours: ours[key] not in values


def unless(key: str, *values: Any) -> Back:
    """The value of the key; nothing for one of these."""
    return lambda ours: None if ours[key] in values else ours[key]


def reverse(key: str, table: Mapping[Any, Any]) -> Back:
    """The first word of the table that means the value of the key."""
    return lambda ours: next((theirs for theirs, mine in table.items() if mine == ours[key]), None)


def start(ours: Ours) -> str | None:
    """PEFT's init_lora_weights."""
    word, count = ours["adapter.start"], ours["adapter.start_iterations"]
    if word == "zero":
        return None
    return word if count is None else f"{word}_niter_{count}"


def switched(key: str) -> Back:
    """True for on, false for off."""
    return reverse(key, {True: "on", False: "off"})


def item(key: str, place: int) -> Back:
    """One value of a list."""
    return lambda ours: ours[key][place]


def clipped(key: str) -> Back:
    """A limit, where 0 means none."""
    return lambda ours: ours[key] or 0.0


def length(key: str, unit: str) -> Back:
    """The number of steps or epochs if the key's value counts these."""

    def back(ours: Ours) -> Any:
        found = Duration.parse(ours[key]) if isinstance(ours[key], str) else None
        return _plain(found.count) if found is not None and found.unit == unit else None

    return back


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def micro(ours: Ours) -> int:
    """Examples of a forward pass: those of batch.micro as far as they divide a step, 1 for auto and for rows."""
    each = _each(ours)
    wanted = ours["batch.micro"] if ours["batch.row_tokens"] is None else "auto"
    return 1 if wanted == "auto" else math.gcd(wanted, each)


def passes(ours: Ours) -> int:
    """Forward passes of a step."""
    return _each(ours) // micro(ours)


def _each(ours: Ours) -> int:
    return max(1, ours["batch.size"] // processes(ours))


def processes(ours: Ours) -> int:
    """Processes of a step, on all machines."""
    return (ours["parallel.nproc"] or 1) * ours["parallel.machines"]


def launch_flags(ours: Ours) -> list[str]:
    """Flags of accelerate. Of several machines each also needs its own number and the address of the first."""
    machines = ours["parallel.machines"]
    return ["--num_processes", str(processes(ours)), *(["--num_machines", str(machines)] if machines > 1 else [])]


USUAL_LENGTH = 2048  # what data.max_length: auto is for most models


def longest(ours: Ours) -> int | None:
    """Tokens of an example, or of a row if batches count rows; None for the model's maximum."""
    limit = ours["batch.row_tokens"] or ours["data.max_length"]
    return USUAL_LENGTH if limit == "auto" else None if limit == "model" else limit


def share_of_warmup(ours: Ours) -> float | None:
    return ours["optim.warmup"] or None if isinstance(ours["optim.warmup"], int | float) else None


def warmup(ours: Ours) -> float | None:
    """warmup_steps of transformers 5, which below 1 is a share."""
    return share_of_warmup(ours) or length("optim.warmup", "steps")(ours)


def schedule(ours: Ours) -> str | None:
    """transformers' name of the schedule."""
    name = str(ours["optim.schedule"])
    if name == "constant":
        return "constant_with_warmup" if ours["optim.warmup"] else name
    return {"cosine": "cosine_with_min_lr", "linear": "polynomial"}.get(name, name) if ours["optim.floor"] else name


def schedule_words(ours: Ours) -> dict[str, float] | None:
    """What transformers' schedules with a final rate take."""
    floor = ours["optim.floor"]
    words = {"cosine": {"min_lr_rate": floor}, "linear": {"lr_end": floor * ours["optim.lr"]}}
    return words.get(ours["optim.schedule"]) if floor else None


def strategy(key: str) -> Back:
    """transformers' strategy for eval_every and checkpoint.every."""

    def back(ours: Ours) -> str:
        if ours[key] is None or (key == "eval_every" and not ours.evaluates):
            return "no"
        every, whole = Duration.parse(ours[key]), Duration.parse(ours["duration"])
        if key == "checkpoint.every" and every == whole:
            return "no"  # only at the end
        return "epoch" if str(every) == "1 epoch" else "steps"

    return back


def interval(key: str) -> Back:
    """Steps between two evaluations or checkpoints; below 1 a fraction of all steps."""

    def back(ours: Ours) -> float | None:
        if strategy(key)(ours) != "steps":
            return None
        every, whole = Duration.parse(ours[key]), Duration.parse(ours["duration"])
        if every.unit == "steps":
            return int(every.count)
        return every.count / whole.count if every.unit == whole.unit == "epochs" and every.count < whole.count else None

    return back


def keeps_best(ours: Ours) -> bool:
    """Whether transformers can load the best checkpoint at the end: one is written with each evaluation."""
    saved, evaluated = (interval(key)(ours) for key in ("checkpoint.every", "eval_every"))
    together = strategy("checkpoint.every")(ours) == strategy("eval_every")(ours) and (
        saved == evaluated or (saved and evaluated and saved >= 1 and evaluated >= 1 and saved % evaluated == 0)
    )
    return ours["checkpoint.best"] == "loss" and ours.evaluates and bool(together)


def tracked(key: str, tracker: str) -> Back:
    """The value of the key if this tracker gets the run's numbers."""
    return lambda ours: ours[key] if tracker in ours["report_to"] else None


NULL = object()
"""A `back` that returns it writes null, which has a meaning of its own there."""


def longest_or_null(ours: Ours) -> Any:
    """As `longest`, for a tool where null sets no limit."""
    return NULL if longest(ours) is None else longest(ours)


def targets(ours: Ours) -> Any:
    """PEFT's target_modules: names, all-linear, or a pattern as a string."""
    return name_or_pattern(ours["adapter.targets"])


def name_or_pattern(named: Any) -> Any:
    """Return a pattern that stands alone as a string, anything else as it is."""
    alone = isinstance(named, list) and len(named) == 1 and named[0].startswith(PATTERN)
    return named[0].removeprefix(PATTERN) if alone else named


def of_model(ours: Ours, names: Iterable[str]) -> str | None:
    """Return the longest name of a template that the model's name contains, None for none."""
    model = _squashed(ours["model.path"])
    return max((name for name in names if _squashed(name) in model), key=len, default=None)


def _squashed(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def pair_losses(ours: Ours) -> list[str]:
    """TRL's loss_type of DPO."""
    return [ours["alignment.loss"], *(["sft"] if ours["alignment.sft"] else [])]


def held_out(ours: Ours) -> float | None:
    """The share or number of records to hold out."""
    share = ours["data.eval"]
    return share if isinstance(share, int | float) else None


def sharding(ours: Ours) -> str | None:
    """transformers' fsdp."""
    words = ("full_shard", "auto_wrap", *(["offload"] if ours["parallel.offload"] == "all" else []))
    return " ".join(words) if ours["parallel.engine"] == "fsdp2" else None


def variables(ours: Ours) -> list[str]:
    """What stands before the command: transformers takes W&B's project from the environment."""
    return [f"WANDB_PROJECT={ours['tracking.project']}"] if "wandb" in ours["report_to"] else []
