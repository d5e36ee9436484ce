"""Three steps of a tiny Llama under any engine, on one rank or on two: what tests of engines compare."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from helpers.toy_model import save_checkpoint, settings
from surefoot.data.batching.batch import Batch, Example, collate
from surefoot.data.batching.loader import for_rank
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.decoder import decoder_matrices
from surefoot.models.forward import causal_model, hidden_states, logits_at
from surefoot.models.peft import LoraConfig, TaskType, get_peft_model
from surefoot.models.save import save_adapter
from surefoot.models.wrapped import freeze_others
from surefoot.runs.parity.passes import nonzero_matrices
from surefoot.system.errors import EnvironmentFault, InputError
from surefoot.training.diagnose import agreed_origin, find_origin
from surefoot.training.engine import ALL, Engine, EngineChoice, Groups, make_engine
from surefoot.training.engine.base import Members, own_part
from surefoot.training.objective import LossSum
from surefoot.training.optimizer import OptimizerSettings, make_optimizers
from surefoot.training.ranks import ALONE, Ranks
from surefoot.training.report import StepReport
from surefoot.training.state import LossScale, RunState
from surefoot.training.step import StepSettings, draw_seed, train_step

VOCABULARY = 61
STEPS = 3
RATE = 1e-3
SINGLE = EngineChoice("single")
ENGINES = {
    "ddp": EngineChoice("ddp"),
    "fsdp2": EngineChoice("fsdp2"),
    "zero1": EngineChoice("deepspeed", 1),
    "zero2": EngineChoice("deepspeed", 2),
    "zero3": EngineChoice("deepspeed", 3),
}
KINDS = ("lora", "dora", "full")
PART = (r"model\.layers\.1\.mlp\..*", r".*\.k_proj", "lm_head")  # one layer has a single trained matrix
ONE: Members = {ALL: lambda name: True}


def tiny(kind: str, *, dropout: float = 0.0, tied: bool = False, base: torch.dtype = torch.float32) -> nn.Module:
    """kind: lora | dora | full | part, the modules that PART names.

    Adapters start away from zero, so that every parameter has a gradient that counts.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(base)
    if kind in ("full", "part"):
        freeze_others(model, PART if kind == "part" else ())
        return model.train()
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=3,
            lora_alpha=6,
            lora_dropout=dropout,
            target_modules="all-linear",
            use_dora=kind == "dora",
            init_lora_weights=False,
            task_type=TaskType.CAUSAL_LM,
        ),
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted.train()


def micro_batches(step: int, count: int) -> list[Batch]:
    """Of all ranks: `count` micro-batches of two examples each."""
    draw = np.random.default_rng(step)
    batches = []
    for number in range(count):
        rows = []
        for row in range(2):
            length = int(draw.integers(4, 10))
            supervised = draw.random(length) < 0.7
            supervised[-1] = True
            rows.append(Example(draw.integers(0, VOCABULARY, length), supervised, 10 * number + row))
        batches.append(collate(rows, pad_id=0))
    return batches


@dataclass(frozen=True)
class Case:
    """counts: micro-batches of each step, over all ranks. limits: clipping, by group or of all."""

    kind: str = "lora"
    dropout: float = 0.0
    tied: bool = False
    base: torch.dtype = torch.float32
    counts: tuple[int, ...] = (4, 3, 2)
    limits: Any = 0.5
    rates: Any = RATE
    members: str = "one"  # one | two
    optimizer: str = "adamw"
    factor: float = 1.0  # of the rate of LoRA's B
    checkpointing: bool = False
    scale: float | None = None
    broken: str = ""  # one of BREAKS, for twins


MEMBERS: dict[str, Members] = {
    "one": ONE,
    "two": {"actor": lambda name: "layers.0" in name, "critic": lambda name: "layers.0" not in name},
}


def engine_for(case: Case, choice: EngineChoice, ranks: Ranks, model: nn.Module | None = None) -> Engine:
    model = model or tiny(case.kind, dropout=case.dropout, tied=case.tied, base=case.base)
    if case.checkpointing:
        enable_gradient_checkpointing(model)

    def make(groups: Groups):
        chosen = OptimizerSettings(case.optimizer, (0.9, 0.99), 0.9 if case.optimizer == "sgd" else None, 1e-8, 0.01)  # pyright: ignore[reportArgumentType]
        factors = {name: case.factor for named in groups.values() for name in named if "lora_B" in name}
        return make_optimizers(groups, dict.fromkeys(groups, chosen), decoder=decoder_matrices(model), factors=factors)

    engine = make_engine(choice, model, MEMBERS[case.members], make, ranks, torch.device("cpu"))
    if case.broken:
        BREAKS[case.broken](engine)
    return engine


def _mean_over_ranks(engine: Any) -> None:
    backward = engine.backward
    engine.backward = lambda loss, scale: backward(loss / engine.world, scale)


def _norm_of_own_share(engine: Any) -> None:
    engine.grad_norms = lambda: {
        name: torch.stack([own_part(one).norm() for one in engine.gradients().values()]).norm()
        for name in engine.groups
    }


def _step_that_was_refused(engine: Any) -> None:
    proper = engine.discard

    def discard() -> None:
        engine.discard = proper  # which a step ends with
        engine.apply(RATE, engine.grad_norms(), None)
        engine.discard = discard

    engine.discard = discard


def _own_totals(engine: Any) -> None:
    totals = engine.totals
    # Weights, which are integers, are still those of all ranks: the twin breaks what the guard looks at.
    engine.totals = lambda values: totals(values) if all(isinstance(one, int) for one in values) else list(values)


def _no_reduce(engine: Any) -> None:
    engine.reduce = lambda: None


def _old_gradients(engine: Any) -> None:
    def forget() -> None:
        engine._pending = engine._reduced = False

    engine._forget = forget


def _reduce_as_they_come(engine: Any) -> None:
    del engine._zero.reduce_ready_partitions_and_remove_grads
    del engine._zero.overlapping_partition_gradients_reduce_epilogue


def _step_without_update(engine: Any) -> None:
    def discard() -> None:
        engine._zero.step()  # with the gate closed
        engine._forget()

    engine.discard = discard


def _empty_tensors(engine: Any) -> None:
    engine.computed_with = lambda: {name: (one.shape, one.detach()) for name, one in engine.parameters.items()}


BREAKS: dict[str, Callable[[Any], None]] = {
    "empty tensors": _empty_tensors,
    "mean": _mean_over_ranks,
    "no reduce": _no_reduce,
    "old gradients": _old_gradients,
    "reduce as they come": _reduce_as_they_come,
    "step without update": _step_without_update,
    "norm of own share": _norm_of_own_share,
    "step that was refused": _step_that_was_refused,
    "own totals": _own_totals,
}


def steps(engine: Engine, case: Case, ranks: Ranks, first: int = 1, objective: Callable = sft_loss) -> list[StepReport]:
    plain = settings(seed=5)
    chosen = StepSettings(plain.seed, _by_group(case.limits), plain.forward, plain.kernels)
    return [
        train_step(
            engine,
            objective,
            list(for_rank(micro_batches(step, count), ranks.rank, ranks.world)),
            step=step,
            lr=_by_group(case.rates),
            scale=None if case.scale is None else LossScale(case.scale),
            settings=chosen,
        )
        for step, count in enumerate(case.counts, first)
    ]


def _by_group(value: Any) -> Any:
    """Pairs of a group and its value, because a case has to be hashable; or one value for all."""
    return dict(value) if isinstance(value, tuple) else value


def snapshot(engine: Engine) -> dict[str, np.ndarray]:
    """Whole weights and moments; empty on all ranks but the first."""
    moments = engine.gather_state()
    with engine.gathered():
        if engine.rank:
            return {}
        weights = dict(engine.model.named_parameters())
        return {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in {**weights, **moments}.items()}


def trained(ranks: Ranks, case: Case, choice: EngineChoice) -> dict[str, Any]:
    engine = engine_for(case, choice, ranks)
    reports = steps(engine, case, ranks)
    return {
        "state": snapshot(engine),
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "decisions": [report.decision for report in reports],
        "metrics": [dict(report.metrics) for report in reports],
        "elements": engine.elements(),
        "whole": sum(parameter.numel() for parameter in tiny(case.kind, tied=case.tied).parameters()),
    }


def shared(
    ranks: Ranks, case: Case, choice: EngineChoice, last: str = "default", *, turning: bool = False
) -> dict[str, Any]:
    """Steps whose loss runs one trunk under two adapters, as an actor and a critic do, and the first of them again, on
    other rows: layers that are done several times in one backward pass, each with some of its gradients. last: the
    adapter of the last pass. turning: the second rank runs the passes the other way round."""
    model: Any = tiny(case.kind)
    model.add_adapter("critic", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)

    def objective(model: Any, batch: Batch) -> LossSum:
        outs = []
        passes = [("default", batch), ("critic", batch), (last, turned(batch))]
        back = turning and ranks.rank == 1
        for adapter, rows in passes[::-1] if back else passes:
            with torch.no_grad():  # PEFT also switches what trains, which is not meant here
                needs = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
                model.set_adapter(adapter)
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(needs[name])
            outs.append(sft_loss(model, rows))
        outs = outs[::-1] if back else outs
        return LossSum(outs[0].loss + 2 * outs[1].loss + 3 * outs[2].loss, outs[0].sums)

    engine = engine_for(case, choice, ranks, model)
    reports = steps(engine, case, ranks, objective=objective)
    return {"state": snapshot(engine), "losses": [report.loss for report in reports]}


def turning(ranks: Ranks, case: Case, choice: EngineChoice) -> dict[str, Any]:
    return shared(ranks, case, choice, "critic", turning=True)


def turned(batch: Batch) -> Batch:
    return replace(batch, input_ids=batch.input_ids.flip(0), targets=batch.targets.flip(0))


def alone(case: Case) -> dict[str, Any]:
    return trained(ALONE, case, SINGLE)


def poisoned(rank: int, step: int, how: str) -> Callable:
    """sft_loss that goes wrong on one rank in one step. how: nan, or a loss that is infinite with finite gradients."""

    def objective(model: nn.Module, batch: Batch) -> LossSum:
        out = sft_loss(model, batch)
        now = torch.initial_seed() in _seeds(step)
        if not (now and dist.get_rank() == rank and batch.weight):
            return out
        return LossSum(out.loss * float("nan") if how == "nan" else out.loss + float("inf"), out.sums)

    return objective


def sparing(ranks: Ranks, case: Case, choice: EngineChoice) -> dict[str, Any]:
    """Steps whose second does without the last layer in the first micro-batch of each of two ranks."""
    spared = {draw_seed(5, 2, number) for number in range(2)}

    def objective(model: Any, batch: Batch) -> LossSum:
        decoder = causal_model(model).model
        layers = decoder.layers
        if torch.initial_seed() in spared:
            decoder.layers = layers[:1]
        try:
            return sft_loss(model, batch)
        finally:
            decoder.layers = layers

    engine = engine_for(case, choice, ranks)
    steps(engine, case, ranks, objective=objective)
    return {"state": snapshot(engine)}


def _seeds(step: int) -> set[int]:
    return {draw_seed(5, step, number) for number in range(16)}


def skipping(ranks: Ranks, case: Case, choice: EngineChoice, how: str) -> dict[str, Any]:
    """Step 2 of three goes wrong on rank 1."""
    engine = engine_for(case, choice, ranks)
    objective = poisoned(1, 2, how)
    first = steps(engine, replace(case, counts=case.counts[:1]), ranks, 1, objective)
    before = snapshot(engine)
    second = steps(engine, replace(case, counts=case.counts[1:2]), ranks, 2, objective)
    after = snapshot(engine)
    third = steps(engine, replace(case, counts=case.counts[2:]), ranks, 3, objective)
    reports = [*first, *second, *third]
    return {
        "decisions": [report.decision for report in reports],
        "before": before,
        "after": after,
        "end": snapshot(engine),
    }


def discarding(ranks: Ranks, case: Case, choice: EngineChoice) -> dict[str, Any]:
    """A step; two passes that are discarded, on other weights that are put back afterwards; and two steps more."""
    engine = engine_for(case, choice, ranks)
    steps(engine, replace(case, counts=case.counts[:1]), ranks)
    parts = {name: part for name, (_, part) in engine.computed_with().items()}
    own = {name: one.clone() for name, one in parts.items()}
    for one in parts.values():
        one.add_(0.5)
    other = _numpy(parts)
    for batch in micro_batches(9, 2):
        engine.backward(sft_loss(engine.model, batch).loss, None)
    engine.reduce()
    engine.discard()
    parts = {name: part for name, (_, part) in engine.computed_with().items()}
    kept = _numpy(parts)
    for name, one in parts.items():
        one.copy_(own[name])
    steps(engine, replace(case, counts=case.counts[1:]), ranks, 2)
    return {"other": other, "kept": kept, "state": snapshot(engine)}


def off_zero(ranks: Ranks, case: Case, choice: EngineChoice) -> dict[str, Any]:
    """Passes of a new adapter, whose B is zero: one as it is, two with its zeros filled. Of each the loss, and the
    largest number of the smallest gradient."""
    model = tiny(case.kind)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.zero_()
    engine = engine_for(case, choice, ranks, model)

    def one_pass() -> tuple[float, float]:
        loss = 0.0
        for batch in for_rank(micro_batches(9, 4), ranks.rank, ranks.world):
            found = sft_loss(engine.model, batch).loss
            engine.backward(found, None)
            loss += float(found)
        engine.reduce()
        smallest = min(float(one.abs().max()) for one in engine.gradients().values() if one.numel())
        engine.discard()
        return engine.totals([loss])[0], smallest

    before = snapshot(engine)
    new = one_pass()
    with nonzero_matrices(engine):
        filled = [one_pass(), one_pass()]
    return {"new": new, "filled": filled, "again": one_pass(), "before": before, "after": snapshot(engine)}


def through_a_checkpoint(ranks: Ranks, case: Case, choice: EngineChoice) -> dict[str, Any]:
    """Three steps, then weights and moments into a fresh engine of the same kind, then one step more in both."""
    engine = engine_for(case, choice, ranks)
    steps(engine, case, ranks)
    written = _to_all(_numpy(engine.gather_state()))
    weights = _to_all(_weights(engine))
    other = tiny(case.kind, dropout=case.dropout, tied=case.tied, base=case.base)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
    again = engine_for(case, choice, ranks, other)
    again.load_state({name: torch.from_numpy(value.copy()) for name, value in written.items()})
    taken = snapshot(again)
    more = replace(case, counts=(4,))
    steps(engine, more, ranks, 4)
    steps(again, more, ranks, 4)
    return {"written": {**written, **weights}, "taken": taken, "on": snapshot(engine), "again": snapshot(again)}


def _weights(engine: Engine) -> dict[str, np.ndarray]:
    with engine.gathered():
        return {} if engine.rank else _numpy(dict(engine.model.named_parameters()))


def _numpy(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().cpu().numpy().copy() for name, tensor in tensors.items()}


def _to_all(value: Any) -> Any:
    """What rank 0 has, everywhere."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def paths(ranks: Ranks, case: Case, choice: EngineChoice) -> dict[str, Any]:
    """Every way in which a stage calls a model, in turn, between two steps: hidden states, some logits, answers with a
    cache. Each by itself, with no pass before that would have left something gathered."""
    engine = engine_for(case, choice, ranks)
    steps(engine, replace(case, counts=case.counts[:1]), ranks)
    batch = micro_batches(9, 1)[0]
    found: dict[str, np.ndarray] = {}
    engine.model.eval()
    with torch.no_grad():
        found["hidden"] = hidden_states(engine.model, batch).numpy()
        found["logits"] = logits_at(engine.model, batch, torch.tensor([1, 3])).numpy()
        cache = DynamicCache(config=causal_model(engine.model).config)
        ids, tokens = batch.input_ids[:, :3], []
        for _ in range(4):
            out = causal_model(engine.model)(input_ids=ids, past_key_values=cache, use_cache=True)
            ids = out.logits[:, -1:].argmax(-1)
            tokens.append(ids.numpy())
        found["answers"] = np.concatenate(tokens, axis=1)
    engine.model.train()
    hidden = hidden_states(engine.model, batch)
    engine.backward(hidden.square().mean() / ranks.world, None)  # the same on every rank, so the sum is one rank's
    engine.reduce()
    found["norm"] = np.array([float(norm) for norm in engine.grad_norms().values()])
    engine.discard()
    steps(engine, replace(case, counts=(2,)), ranks, 2)
    return {"found": found, "state": snapshot(engine)}


def written(ranks: Ranks, case: Case, choice: EngineChoice, folder: Path) -> dict[str, Any]:
    """Three steps and a checkpoint of an adapter."""
    engine = engine_for(case, choice, ranks)
    steps(engine, case, ranks)
    gathered: list[str] = []

    def write_model(staging: Path) -> None:
        save_adapter(engine.model, staging, save_embedding=False)  # pyright: ignore[reportArgumentType]
        gathered.extend(name for name, one in engine.model.named_parameters() if type(one) is nn.Parameter and len(one))

    save_checkpoint(folder, engine, RunState(step=3), write_model=write_model, frozen=False)
    return {"state": snapshot(engine), "gathered": gathered}


def origin(ranks: Ranks, case: Case, choice: EngineChoice) -> str | None:
    """Where a value went wrong that goes wrong on rank 1 alone, in its second micro-batch, in the forward pass."""
    engine = engine_for(case, choice, ranks)
    seen = [0]

    def spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        seen[0] += 1
        return output * float("inf") if (seen[0] == 2 and dist.get_rank() == 1) else output

    next(
        one for name, one in engine.model.named_modules() if name.endswith("layers.1.mlp.down_proj")
    ).register_forward_hook(spoil)
    batches = list(for_rank(micro_batches(1, 4), ranks.rank, ranks.world))
    found = find_origin(engine, sft_loss, batches, step=1, scale=None, settings=settings(seed=5)).origin
    said = agreed_origin(engine, found)
    report = steps(engine, replace(case, counts=(2,)), ranks)[0]  # and it can go on
    assert report.decision == "stepped"
    return said


def refusal(ranks: Ranks, case: Case, choice: EngineChoice) -> tuple[str, str]:
    """Code and place of the fault that refuses such an engine."""
    with pytest.raises(InputError) as caught:
        engine_for(case, choice, ranks)
    return caught.value.faults[0].code, caught.value.faults[0].where


def replicas(ranks: Ranks, choice: EngineChoice, when: str) -> tuple[str, str] | None:
    """Code and place of the fault of ranks whose weights differ: from the beginning, or from a flipped bit later on."""
    case = Case()
    model = tiny("lora")
    parameter = next(one for one in model.parameters() if one.requires_grad)
    try:
        with torch.no_grad():
            if when == "beginning" and ranks.rank == 1:
                parameter.view(torch.int32).view(-1)[0] ^= 1
            engine = engine_for(case, choice, ranks, model)
        steps(engine, case, ranks)
        engine.check_replicas()
        if when == "later" and ranks.rank == 1:
            engine.optimizer.state[parameter]["exp_avg"].view(torch.int32).view(-1)[0] ^= 1
        engine.check_replicas()
    except EnvironmentFault as error:
        return error.faults[0].code, error.faults[0].where
    return None
