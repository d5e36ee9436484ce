"""Which modules carry the adapter, by full name, and how many parameters that trains.

LoRA adds r * (inputs + outputs) per target, DoRA one more per output; a module saved in full counts in full. Rows that
are appended for a new token belong to embedding and head, and count where one of these trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.config.sections import AdapterShape
from surefoot.families import FAMILIES, counterpart
from surefoot.families.model_facts import ModelFacts, ModuleFact
from surefoot.planning.notes import Notes
from surefoot.planning.plan import AdapterPlan, Choice
from surefoot.system.messages import nearest_word


def plan_adapter(
    request: AdapterShape, model: ModelFacts, added_rows: int, notes: Notes, key: str = "adapter"
) -> AdapterPlan:
    """Which modules carry an adapter, and how many parameters that trains.

    added_rows: embedding rows that the run appends to the model.
    key: where the request stands in the config.
    """
    model = _with_rows(model, added_rows)
    targets = _targets(request, model, notes, key)
    saved = _saved_in_full(request.modules_to_save, targets, model, notes, key)
    _look_at_rank(request.rank, targets, notes, key)
    per_output = 1 if request.kind == "dora" else 0
    added = sum(request.rank * sum(_sizes(target)) + per_output * _sizes(target)[1] for target in targets)
    names = tuple(target.name for target in targets)
    if request.targets == "all-linear":
        choice = Choice(names, f"all {len(names)} linear layers but the output head", "default")
    else:
        choice = Choice(names, f"asked for: {', '.join(request.targets)}", "user")
    return AdapterPlan(
        kind=Choice(request.kind, "asked for", "user"),
        rank=request.rank,
        alpha=request.alpha,
        dropout=request.dropout,
        rslora=request.rslora,
        targets=choice,
        modules_to_save=tuple(_short(name, model) for name in request.modules_to_save),
        trainable=added + _size_in_full(saved, model),
    )


def _look_at_rank(rank: int, targets: Sequence[ModuleFact], notes: Notes, key: str) -> None:
    """An update of an m × n matrix has no more than rank min(m, n): from there on an adapter only costs."""
    reached = [target for target in targets if rank >= min(_sizes(target))]
    if not reached:
        return
    narrowest = min(reached, key=lambda target: min(_sizes(target)))
    inputs, outputs = _sizes(narrowest)
    side = min(inputs, outputs)
    notes.caution(
        f"{key}.rank {rank:,} reaches the narrower side of {len(reached)} of {len(targets)} matrices with an adapter"
        f", such as {narrowest.name} ({inputs:,} inputs, {outputs:,} outputs): no update of it has a higher rank than "
        f"{side:,}, and its adapter holds more numbers than it does; a lower rank is meant, or full fine-tuning"
    )


def _with_rows(model: ModelFacts, rows: int) -> ModelFacts:
    """The model with `rows` more in its embedding and its head."""

    def grown(module: ModuleFact) -> ModuleFact:
        if module.name not in (model.embedding, model.head):
            return module
        linear = module.linear and (module.linear[0], module.linear[1] + rows)
        return replace(module, parameters=module.parameters + rows * model.embedding_width, linear=linear)

    return replace(model, vocab=model.vocab + rows, modules=tuple(map(grown, model.modules)))


def _targets(request: AdapterShape, model: ModelFacts, notes: Notes, key: str) -> list[ModuleFact]:
    if request.targets == "all-linear":
        return list(model.layer_linears)
    for name in request.targets:
        if not any(_named(module, name) and module.linear for module in model.modules):
            what = f"no linear layer lies in {name!r}" if name.endswith(".") else f"no linear layer is called {name!r}"
            notes.refuse(f"{key}.targets", what, _suggestion(name, model, linear=True))
    chosen = [module for module in model.modules if module.linear and any(_named(module, n) for n in request.targets)]
    if model.tied and any(module.name == model.head for module in chosen):
        what = f"{model.head} shares its weight with {model.embedding}, and an adapter on one of them would part them"
        notes.refuse(f"{key}.targets", what, f"leave out {model.head.rpartition('.')[2]}")
    return chosen


def _named(module: ModuleFact, name: str) -> bool:
    """PEFT's rule for targets: the full name, or its last components. With a dot at its end it is a place: every module
    on whose path it lies."""
    if name.endswith("."):
        return f".{name}" in f".{module.name}"
    return module.name == name or module.name.endswith(f".{name}")


def _saved_in_full(
    names: Sequence[str], targets: Sequence[ModuleFact], model: ModelFacts, notes: Notes, key: str
) -> list[ModuleFact]:
    """PEFT's rule for modules_to_save: any module whose name ends so."""
    for name in names:
        if not any(module.name.endswith(name) for module in model.modules):
            fix = _suggestion(name, model, linear=False)
            notes.refuse(f"{key}.modules_to_save", f"no module is called {name!r}", fix)
    saved = [module for module in model.modules if any(module.name.endswith(name) for name in names)]
    for module in saved:
        if module in targets:
            notes.refuse(f"{key}.modules_to_save", f"{module.name} already carries the adapter", "name it in one place")
    return saved


def _short(name: str, model: ModelFacts) -> str:
    """Embedding and head by their last component: so PEFT recognises a pair that must stay tied."""
    return name.rpartition(".")[2] if name in (model.embedding, model.head) else name


def _size_in_full(saved: Sequence[ModuleFact], model: ModelFacts) -> int:
    """Embedding and head that share a weight stay one, whichever of them is named."""
    shared = [module for module in saved if module.name in (model.embedding, model.head)]
    once_too_many = shared[1:] if model.tied else []
    return sum(module.parameters for module in saved) - sum(module.parameters for module in once_too_many)


def _suggestion(name: str, model: ModelFacts, *, linear: bool) -> str:
    if linear and (place := _layers(model)) and _is_place(name):
        whose = f"in {model.family.name} models" if model.family else "in this model"
        return f"{whose} the layers lie in {place!r}"
    existing = dict.fromkeys(module.name.rpartition(".")[2] for module in model.modules if module.linear or not linear)
    wanted = name.rpartition(".")[2]
    if linear and model.family and (other := counterpart(wanted, model.family)):
        return f"in {model.family.name} models that is {other}; there are {', '.join(existing)}"
    near = nearest_word(wanted, list(existing))
    return f"did you mean {near}?" if near else f"there are {', '.join(existing)}"


def _is_place(name: str) -> bool:
    """Whether it ends where the layers of some family begin, such as "decoder.layers", with or without a dot."""
    places = {family.structure.layers for family in FAMILIES if family.structure}
    return name.rstrip(".").rpartition(".")[2] in {place.rpartition(".")[2] for place in places}


def _layers(model: ModelFacts) -> str:
    """The place of the numbered layers by its last two names, as DeepSpeed-Chat's scripts write it: "decoder.layers."
    of OPT, "model.layers." of Llama. Empty where no layer has a number."""
    for module in model.layer_linears:
        components = module.name.split(".")
        number = next((at for at, component in enumerate(components) if component.isdigit()), 0)
        if number:
            return ".".join(components[max(0, number - 2) : number]) + "."
    return ""


def _sizes(module: ModuleFact) -> tuple[int, int]:
    assert module.linear is not None
    return module.linear
