"""The objective of stage distill on a tiny model: its parts, and what may not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from helpers.architectures import GEMMA2, LLAMA, build
from surefoot.data.batching.batch import DrawnBatch, Example
from surefoot.data.batching.loader import Layout, to_batch
from surefoot.methods.distill import teacher as teachers
from surefoot.methods.distill.teacher import teacher_of
from surefoot.methods.losses import distill as losses
from surefoot.methods.losses.distill import DistillSettings, distill_objective, stand_in
from surefoot.methods.losses.sft import supervised_logits, supervised_places
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.packing import packed_attention

SAME = 1e-9  # relative, in float64; hidden states agree to its last places
LENGTHS = [(9, 3), (4, 6), (12, 1), (2, 7)]  # prompt, answer
HOW = DistillSettings(beta=0.3, temperature=1.5, sft=0.4)


def model_of(seed: int):
    torch.manual_seed(seed)
    model = build(LLAMA, device="cpu", attn_implementation="sdpa").double().train()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def student():
    return model_of(0)


@pytest.fixture(scope="module")
def other():
    return model_of(1).requires_grad_(False)


def examples() -> list[Example]:
    rng = np.random.default_rng(0)
    rows = [(rng.integers(3, 60, prompt + answer), prompt) for prompt, answer in LENGTHS]
    return [Example(ids, np.arange(len(ids)) >= prompt, number) for number, (ids, prompt) in enumerate(rows)]


def measured(model, objective, *batches) -> torch.Tensor:
    """Loss and gradients in one row of numbers."""
    model.zero_grad()
    losses = [objective(model, batch).loss for batch in batches]
    for loss in losses:
        loss.backward()
    gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
    return torch.cat([sum(one.detach() for one in losses)[None], *gradients])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize("path", [False, True])
def test_padding_packing_order_and_micro_batches_change_nothing(student, other, path):
    objective, rows = distill_objective(HOW, teacher_of(other, 320)), examples()
    wanted = measured(student, objective, to_batch(rows, Layout(0)))
    undo = loss_path(rows=3).install(student) if path else lambda: None
    try:
        ones = [to_batch([one], Layout(0)) for one in reversed(rows)]
        assert apart(wanted, measured(student, objective, *ones)) < SAME
        undos = [packed_attention("sdpa").install(model) for model in (student, other)]
        packed = to_batch(rows, Layout(0, packed=True))
        assert apart(wanted, measured(student, objective, packed)) < SAME
        undos[1]()  # a teacher that takes no packed rows
        padding = distill_objective(HOW, teacher_of(other, 320, pad_id=0))
        assert apart(wanted, measured(student, padding, packed)) < SAME
        undos[0]()
    finally:
        undo()


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_teacher_that_is_the_student_gives_exactly_nothing_under_autocast(cap):
    """A model caps in bf16, the chunked head in fp32: both have to take the same way."""
    torch.manual_seed(0)
    model = build(GEMMA2 | {"final_logit_softcapping": cap}, device="cpu").eval()
    batch = to_batch(examples(), Layout(0))

    def loss(**how) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            objective = distill_objective(DistillSettings(0.5, 1.0, 0.0), teacher_of(model, 320, **how))
            return float(objective(model, batch).loss.detach())

    assert loss(chunked=False) == 0
    assert cap is None or loss(chunked=True) > 0  # twin: the student's head is not
    undo = loss_path(rows=3).install(model)
    assert loss(chunked=True) == 0
    undo()


def test_twin_a_teacher_of_other_rows_is_seen(student, other):
    batch = to_batch(examples(), Layout(0))
    teacher = teacher_of(other, 320)
    wanted = measured(student, distill_objective(HOW, teacher), batch)

    def shifted(rows, places):
        other_rows = to_batch(examples()[::-1], Layout(0))
        return teacher(other_rows, supervised_places(other_rows)[0])

    assert apart(wanted, measured(student, distill_objective(HOW, shifted), batch)) > 1e-3


def test_its_own_answers_have_no_cross_entropy(student, other):
    batch, teacher = to_batch(examples(), Layout(0)), teacher_of(other, 320)
    given = measured(student, distill_objective(HOW, teacher), batch)
    drawn = measured(student, distill_objective(HOW, teacher), DrawnBatch(batch, batch.weight))
    logits, targets = supervised_logits(student, batch)
    student.zero_grad()
    loss = HOW.sft * F.cross_entropy(logits, targets, reduction="sum")
    loss.backward()
    added = torch.cat(
        [loss.detach()[None], *(one.grad.flatten() for one in student.parameters() if one.grad is not None)]
    )
    assert apart(given, drawn + added) < 1e-6  # two backward passes, through norms in fp32


def test_an_evaluation_tells_the_cross_entropy_and_the_agreement(student, other):
    batch, objective = to_batch(examples(), Layout(0)), distill_objective(HOW, teacher_of(other, 320))
    with torch.no_grad():
        found = objective(student, batch)
        logits, targets = supervised_logits(student, batch)
        theirs, _ = supervised_logits(other, batch)
    assert float(found.sums["cross_entropy"]) == pytest.approx(float(F.cross_entropy(logits, targets, reduction="sum")))
    assert int(found.sums["agreement"]) == int((logits.argmax(1) == theirs.argmax(1)).sum())
    assert float(found.loss) == pytest.approx(
        float(found.sums["divergence"]) + HOW.sft * float(found.sums["cross_entropy"]), rel=1e-5
    )
    assert objective(student, batch).sums.keys() == {"divergence"}


def test_learned_tokens_are_found_once_and_before_the_teacher_runs(student, other, monkeypatch):
    """On a GPU the host waits for them, so not while a teacher's forward pass is queued."""
    seen, teacher = [], teacher_of(other, 320)
    for module in (losses, teachers):
        monkeypatch.setattr(module, "supervised_places", lambda rows: seen.append("places") or supervised_places(rows))

    def watched(rows, places):
        seen.append("teacher")
        return teacher(rows, places)

    distill_objective(HOW, watched)(student, to_batch(examples(), Layout(0)))
    assert seen == ["places", "teacher"]


def test_the_stand_in_moves_every_part_of_the_student(student):
    found = measured(student, distill_objective(HOW, stand_in), to_batch(examples(), Layout(0)))
    assert found.isfinite().all()
    assert all(one.grad is not None and one.grad.any() for one in student.parameters())


def test_rows_without_a_learned_token_give_nothing(student, other):
    (example, *_) = examples()
    nothing = to_batch([Example(example.ids, np.zeros(len(example.ids), bool), 0)], Layout(0))
    found = measured(student, distill_objective(HOW, teacher_of(other, 320)), nothing)
    assert not found.any()
