"""Choose the modules that get an adapter, by full name, and count the trainable parameters.

LoRA adds r * (inputs + outputs) parameters per target, DoRA one more per output; a module in `modules_to_save` counts
in full. Rows appended for a new token belong to embedding and head, and count if one of these is trained. Experts whose
weights are stacked in one parameter get one LoRA pair per expert; PEFT supports neither DoRA nor dropout for them.
`all-linear` includes experts unless `experts: false`, because they hold most weights of a mixture. Routers are left
alone unless requested.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from surefoot.config.schema import AdapterConfig
from surefoot.config.sections import PATTERN, AdapterShape
from surefoot.families import FAMILIES, counterpart
from surefoot.families.model_facts import MatrixFact, ModelFacts, ModuleFact
from surefoot.planning.coverage import check_depth, coverage
from surefoot.planning.notes import Notes
from surefoot.planning.plan import ZERO, AdapterPlan, Choice
from surefoot.system.messages import nearest_word

_DORA = "SF-ADAPTER-DORA"
_TARGETS = "SF-ADAPTER-TARGETS"


def plan_adapter(
    request: AdapterShape,
    model: ModelFacts,
    added_rows: int,
    notes: Notes,
    key: str = "adapter",
    beside: Sequence[ModuleFact] = (),
) -> AdapterPlan:
    """Choose the modules that get an adapter and count the trainable parameters.

    added_rows: embedding rows that the run appends to the model.
    key: path of the request in the config.
    beside: linear layers outside of the language model that may be targets, too.
    """
    model = _with_rows(model, added_rows)
    targets = _targets(request, replace(model, modules=(*model.modules, *beside)), notes, key)
    matrices = _matrices(request, model)
    if obstacle := _obstacle(request):
        matrices = _without(matrices, request, obstacle, notes, key)
        _refuse_parameters(targets, request, notes, key)
    saved = _saved_in_full(names_to_save(request), targets, model, notes, key)
    _check_rank(request.rank, targets, matrices, notes, key)
    per_output = 1 if request.kind == "dora" else 0
    added = sum(request.rank * sum(_sizes(target)) + per_output * _sizes(target)[1] for target in targets)
    added += sum(request.rank * matrix.sides for _, matrix in matrices)
    names = tuple(target.name for target in targets)
    plan = AdapterPlan(
        kind=Choice(request.kind, _asked(request), "user"),
        rank=request.rank,
        alpha=request.alpha,
        dropout=request.dropout,
        rslora=request.rslora,
        targets=_choice(request, names, matrices, model),
        modules_to_save=tuple(_short(name, model) for name in names_to_save(request)),
        trainable=added + _size_in_full(saved, model),
        parameters=tuple(_full_name(module, matrix) for module, matrix in matrices),
        start=_start(request, targets, matrices, notes, key),
    )
    if request.targets == "all-linear" and request.experts == "auto":
        check_depth(coverage(model, plan), *_why_shallow(request, model, obstacle), notes, key)
    return plan


def with_rest(request: AdapterShape, model: ModelFacts, *, head: bool) -> AdapterShape:
    """Return the request with the modules that `modules_to_save: rest` means.

    head: whether the output head trains; a tied one is the embedding.
    """
    if request.modules_to_save != "rest":
        return request
    targets = _targets(request, model, Notes(), "")
    stacked = [] if _obstacle(request) else [module for module, _ in _matrices(request, model)]
    rest = [module for module in model.modules if module not in targets and module not in stacked]
    names = [module.name for module in rest if head or model.tied or module.name != model.head]
    short = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    # PEFT takes every module whose name ends with one of these.
    clear = not any(module.name.endswith(tuple(short)) for module in (*targets, *stacked))
    return request.model_copy(update={"modules_to_save": short if clear else names})


def with_new_tokens(request: AdapterShape, model: ModelFacts, *, head: bool) -> AdapterShape:
    """Return the request with embedding and head trained in full, without which rows of new tokens would stay as they
    are drawn, unless the request names one of them.

    head: as in `with_rest`.
    """
    pair = (model.embedding, model.head) if head and not model.tied else (model.embedding,)
    named = any(name.endswith(saved) for name in (model.embedding, model.head) for saved in names_to_save(request))
    if named:
        return request
    saved = [*names_to_save(request), *(name.rpartition(".")[2] for name in pair)]
    return request.model_copy(update={"modules_to_save": saved})


def names_to_save(request: AdapterShape) -> list[str]:
    """Return the modules that train in full, after `with_rest`."""
    return [] if request.modules_to_save == "rest" else request.modules_to_save


def _start(
    request: AdapterShape, targets: Sequence[ModuleFact], matrices: Sequence[_Stacked], notes: Notes, key: str
) -> str:
    """Return PEFT's word for what the adapter starts from."""
    if not isinstance(request, AdapterConfig) or request.start == ZERO:
        return ZERO
    if matrices:
        what = f"{request.start} has no form for {_full_name(*matrices[0])}, which is no linear layer"
        notes.refuse(f"{key}.start", what, f"leave it out, or set {key}.experts: false", _TARGETS)
    narrow = min(targets, key=lambda target: min(_sizes(target)), default=None)
    if narrow and min(_sizes(narrow)) < request.rank:
        what = f"{request.rank} is above the narrower side of {narrow.name}, which has no further factors to start from"
        notes.refuse(f"{key}.rank", what, f"use at most {min(_sizes(narrow))}, or leave {key}.start out")
    return request.start if request.start_iterations is None else f"{request.start}_niter_{request.start_iterations}"


_Stacked = tuple[ModuleFact, MatrixFact]  # a parameter outside linear layers (such as stacked experts), with its module


def _full_name(module: ModuleFact, matrix: MatrixFact) -> str:
    return f"{module.name}.{matrix.name}"


def _asked(request: AdapterShape) -> str:
    """Return why the adapter has this shape: a saved one that training starts from has it, or the config names it."""
    saved = isinstance(request, AdapterConfig) and request.initial is not None
    return "as adapter.initial has it" if saved else "asked for"


def _choice(
    request: AdapterShape, names: tuple[str, ...], matrices: Sequence[_Stacked], model: ModelFacts
) -> Choice[tuple[str, ...]]:
    if request.targets != "all-linear":
        return Choice(names, f"{_asked(request)}: {', '.join(request.targets)}", "user")
    of_experts = sum(matrix.experts for module, matrix in matrices if not module.routes)
    experts = f" and {of_experts:,} matrices of experts" if of_experts else ""
    frozen = (module.name.rpartition(".")[2] for module in model.layer_linears if module.name not in names)
    without = ", ".join(dict.fromkeys(("the output head", *frozen)))
    return Choice(names, f"all {len(names)} linear layers{experts}, without {without}", "default")


def _obstacle(request: AdapterShape) -> str:
    """Return why PEFT cannot adapt a parameter outside linear layers; empty if it can."""
    if request.kind == "dora":
        return "DoRA has no form for parameters that are no linear layers"
    if request.dropout:
        return "a parameter that is not a linear layer has no input that adapter.dropout could drop from"
    return ""


def _matrices(request: AdapterShape, model: ModelFacts) -> list[_Stacked]:
    """Return the parameters outside linear layers that get an adapter."""
    stacked = [(module, matrix) for module in model.modules for matrix in module.matrices if module.in_layer]
    if request.targets == "all-linear":
        return [one for one in stacked if (request.router if one[0].routes else request.experts is not False)]

    def requested(module: ModuleFact, matrix: MatrixFact) -> bool:
        if request.experts is False and not module.routes:
            return False
        names = request.targets if not module.routes else [name for name in request.targets if not name.endswith(".")]
        own = any(_named(module, name) or _is(_full_name(module, matrix), name) for name in names)
        return own or (request.router and module.routes) or (request.experts is True and not module.routes)

    return [one for one in stacked if requested(*one)]


def _without(matrices: list[_Stacked], request: AdapterShape, obstacle: str, notes: Notes, key: str) -> list[_Stacked]:
    """Drop all of them, with an error if they were requested."""
    routers = [one for one in matrices if one[0].routes]
    named = request.targets != "all-linear" or request.experts is True
    which, switch = ("experts", f"{key}.experts: false") if len(matrices) > len(routers) else ("", "")
    if which and named:
        notes.refuse(f"{key}.targets", f"the experts do not support this adapter: {obstacle}", f"set {switch}", _DORA)
    if routers:
        what = f"the routers do not support this adapter: {obstacle}"
        notes.refuse(f"{key}.router", what, f"remove {key}.router, or name them in {key}.modules_to_save", _DORA)
    return []


def _refuse_parameters(targets: Sequence[ModuleFact], request: AdapterShape, notes: Notes, key: str) -> None:
    """Refuse linear layers that PEFT would adapt as parameters, because their names are also those of experts."""
    as_parameters = sorted({target.name.rpartition(".")[2] for target in targets if target.as_parameter})
    others = sorted({target.name.rpartition(".")[2] for target in targets if not target.as_parameter})
    if not as_parameters:
        return
    what = f"PEFT adapts {', '.join(as_parameters)} as parameters here, "
    what += f"also where they are linear layers: {_obstacle(request)}"
    place, change = (f"{key}.kind", "lora") if request.kind == "dora" else (f"{key}.dropout", "0")
    leave = f", or name {key}.targets: [{', '.join(others)}]" if others else ""
    notes.refuse(place, what, f"set {place}: {change}{leave}", _DORA if request.kind == "dora" else _TARGETS)


def _why_shallow(request: AdapterShape, model: ModelFacts, obstacle: str) -> tuple[str, tuple[str, str]]:
    """Explain why an adapter on all linear layers covers so few weights, and give the fix."""
    if obstacle and model.experts:
        change = "adapter.kind: lora" if request.kind == "dora" else "adapter.dropout: 0"
        return f"the experts stay frozen, because {obstacle}", (f"set {change}", "adapter.experts: false")
    return "other weights are in no linear layer", ("train all weights", "name adapter.targets")


def _check_rank(rank: int, targets: Sequence[ModuleFact], matrices: Sequence[_Stacked], notes: Notes, key: str) -> None:
    """Warn if the rank is too high. An update of an m × n matrix has rank min(m, n) at most, so more rank only
    costs."""
    sizes = {target.name: _sizes(target) for target in targets}
    sizes |= {_full_name(*one): (one[1].inputs, one[1].outputs) for one in matrices}
    reached = [name for name in sizes if rank >= min(sizes[name])]
    if not reached:
        return
    narrowest = min(reached, key=lambda name: min(sizes[name]))
    inputs, outputs = sizes[narrowest]
    side = min(inputs, outputs)
    notes.caution(
        f"{key}.rank {rank:,} reaches the narrower side of {len(reached)} of {len(sizes)} matrices with an adapter"
        f", such as {narrowest} ({inputs:,} inputs, {outputs:,} outputs): no update of it has a higher rank than "
        f"{side:,}, and its adapter holds more numbers than it does; a lower rank is meant, or full fine-tuning"
    )


def _with_rows(model: ModelFacts, rows: int) -> ModelFacts:
    """The model with `rows` more rows in its embedding and head."""

    def grown(module: ModuleFact) -> ModuleFact:
        if module.name not in (model.embedding, model.head):
            return module
        linear = module.linear and (module.linear[0], module.linear[1] + rows)
        return replace(module, parameters=module.parameters + rows * model.embedding_width, linear=linear)

    return replace(model, vocab=model.vocab + rows, modules=tuple(map(grown, model.modules)))


def _targets(request: AdapterShape, model: ModelFacts, notes: Notes, key: str) -> list[ModuleFact]:
    left_out = {
        module.name
        for module in model.modules
        if (module.routes and not request.router) or (module.of_experts and request.experts is False)
    }
    barred = model.family.without_adapter if model.family else ()
    if request.targets == "all-linear":
        left_out |= {module.name for module in model.layer_linears if module.name.rpartition(".")[2] in barred}
        return [module for module in model.layer_linears if module.name not in left_out]
    for name in request.targets:
        if not any(_matches(module, name) for module in model.modules):
            what = f"no linear layer is in {name!r}" if name.endswith(".") else f"no linear layer is called {name!r}"
            notes.refuse(f"{key}.targets", what, _suggestion(name, model, linear=True), _TARGETS)
    chosen = [
        module
        for module in model.modules
        if module.linear
        and any(_named(module, n) and not (n.endswith(".") and module.name in left_out) for n in request.targets)
    ]
    if never := sorted({short for one in chosen if (short := one.name.rpartition(".")[2]) in barred}):
        what = f"{', '.join(never)}: in training {model.model_type} uses these weights without an adapter"
        notes.refuse(f"{key}.targets", what, "leave them out", "SF-ADAPTER-TARGETS")
    if model.tied and any(module.name == model.head for module in chosen):
        what = f"{model.head} shares its weight with {model.embedding}, and an adapter on one of them would untie them"
        notes.refuse(f"{key}.targets", what, f"leave out {model.head.rpartition('.')[2]}", _TARGETS)
    return chosen


def _named(module: ModuleFact, name: str) -> bool:
    """PEFT's rules for targets: the full name or its last components, or a pattern of the full name. A name with a
    trailing dot is a path prefix: it matches every module inside it."""
    if name.startswith(PATTERN):
        return re.fullmatch(name.removeprefix(PATTERN), module.name) is not None
    if name.endswith("."):
        return f".{name}" in f".{module.name}"
    return _is(module.name, name)


def _is(full: str, name: str) -> bool:
    return full == name or full.endswith(f".{name}")


def _matches(module: ModuleFact, name: str) -> bool:
    """Whether a target of this name matches the module or one of its parameters."""
    if module.linear:
        return _named(module, name)
    return any(_named(module, name) or _is(_full_name(module, matrix), name) for matrix in module.matrices)


def _saved_in_full(
    names: Sequence[str], targets: Sequence[ModuleFact], model: ModelFacts, notes: Notes, key: str
) -> list[ModuleFact]:
    """PEFT's rule for modules_to_save: any module whose name ends with the given one."""
    for name in names:
        if not any(module.name.endswith(name) for module in model.modules):
            fix = _suggestion(name, model, linear=False)
            notes.refuse(f"{key}.modules_to_save", f"no module is called {name!r}", fix, _TARGETS)
    saved = [module for module in model.modules if any(module.name.endswith(name) for name in names)]
    for module in saved:
        if module in targets:
            notes.refuse(f"{key}.modules_to_save", f"{module.name} already has the adapter", "name it once")
    inside = ((one, target) for one in saved for target in targets if target.name.startswith(f"{one.name}."))
    if (found := next(inside, None)) is not None:
        what = f"{found[0].name} contains {found[1].name}, which has the adapter; PEFT trains a module with all inside"
        notes.refuse(f"{key}.modules_to_save", what, "name modules without adapters inside", _TARGETS)
    return saved


def _short(name: str, model: ModelFacts) -> str:
    """Shorten embedding and head to their last component: PEFT recognizes tied modules by it."""
    return name.rpartition(".")[2] if name in (model.embedding, model.head) else name


def _size_in_full(saved: Sequence[ModuleFact], model: ModelFacts) -> int:
    """Parameters of the saved modules; a tied embedding and head count once."""
    shared = [module for module in saved if module.name in (model.embedding, model.head)]
    once_too_many = shared[1:] if model.tied else []
    return sum(module.parameters for module in saved) - sum(module.parameters for module in once_too_many)


def _suggestion(name: str, model: ModelFacts, *, linear: bool) -> str:
    if linear and (place := _layers(model)) and _is_place(name):
        whose = f"in {model.family.name} models" if model.family else "in this model"
        return f"{whose} the layers lie in {place!r}"
    existing = dict.fromkeys(module.name.rpartition(".")[2] for module in model.modules if module.linear or not linear)
    if linear:  # experts and routers that are parameters
        stacked = [(module.name, one.name) for module in model.modules for one in module.matrices if module.in_layer]
        existing |= dict.fromkeys(f"{module.rpartition('.')[2]}.{matrix}" for module, matrix in stacked)
    wanted = name.rpartition(".")[2]
    if linear and model.family and (other := counterpart(wanted, model.family)):
        return f"in {model.family.name} models that is {other}; there are {', '.join(existing)}"
    near = nearest_word(name, list(existing)) or nearest_word(wanted, list(existing))
    return f"did you mean {near}?" if near else f"there are {', '.join(existing)}"


def _is_place(name: str) -> bool:
    """Whether the name ends with the module list of some family, such as "decoder.layers", with or without a dot."""
    places = {family.structure.layers for family in FAMILIES if family.structure}
    return name.rstrip(".").rpartition(".")[2] in {place.rpartition(".")[2] for place in places}


def _layers(model: ModelFacts) -> str:
    """Return the last two components of the path of the numbered layers, as in DeepSpeed-Chat's scripts:
    "decoder.layers." for OPT, "model.layers." for Llama. Empty if no layer has a number."""
    for module in model.layer_linears:
        components = module.name.split(".")
        number = next((at for at, component in enumerate(components) if component.isdigit()), 0)
        if number:
            return ".".join(components[max(0, number - 2) : number]) + "."
    return ""


def _sizes(module: ModuleFact) -> tuple[int, int]:
    assert module.linear is not None
    return module.linear
