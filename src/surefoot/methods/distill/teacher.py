"""The teacher of stage distill, found before its weights are read, and opened as a model in memory.

It belongs to no engine: each rank holds all of it, frozen. Its ids must be the student's: a distribution over other
tokens says nothing. Its embedding may have more or fewer rows than the student's, which are spare; the distributions
are compared over the ids that both have.

Where it has the student's architecture it gets the student's fast paths, which are compared with the plain code on the
student. So a teacher with the student's weights gives the same bits, and a loss of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Batch, unpacked
from surefoot.kernels.divergence import Whole
from surefoot.kernels.operands import operand_type
from surefoot.methods.distill.served import KEY, open_model
from surefoot.methods.distill.stored import META, is_stored, read_facts
from surefoot.methods.losses.distill import Teacher
from surefoot.methods.losses.sft import supervised_places
from surefoot.methods.method import LoadedModels, Notify
from surefoot.methods.open_model import find_parts, open_for_use
from surefoot.methods.reference import same_ids
from surefoot.methods.reward_source import frozen_type, weights_fingerprint
from surefoot.models.facts import facts_of
from surefoot.models.fast.chunked_head import changes_logits, head_obstacle, own_head
from surefoot.models.fast.last_block import last_block_path
from surefoot.models.fast.packing import documents_fault, packed_attention
from surefoot.models.fast.pointwise import fused_paths
from surefoot.models.folder import resolve_folder, stored_tensors
from surefoot.models.forward import causal_model, hidden_at, logits_at
from surefoot.models.load import load_tokenizer
from surefoot.models.modes import inference_mode
from surefoot.models.saved_adapter import is_adapter
from surefoot.planning.plan import PLAIN, RunPlan
from surefoot.planning.reference import TeacherFacts
from surefoot.system.durable import sha256_file
from surefoot.system.errors import Fault, InputError, SurefootError
from surefoot.system.locations import is_address


def require_teacher(config: RunConfig) -> None:
    """Fetch the teacher's weights, where the hub has them. Raises InputError where they are missing or cut off."""
    assert config.distill.teacher is not None
    if is_stored(config.distill.teacher) or is_address(config.distill.teacher):
        return
    with _of_the_key():
        base, _ = find_parts(config.distill.teacher, None)
        stored_tensors(base)


def find_teacher(config: RunConfig, base: Path) -> TeacherFacts:
    """Return the facts of the teacher, for the plan. Reads no weights.

    base: folder of the student's base.

    Raises InputError for a model that is not there, is none, or has another tokenizer.
    """
    path = config.distill.teacher
    assert path is not None, "config.contradictions asks for it"
    if is_stored(path):
        return _stored_facts(config, path)
    if is_address(path):
        why = f"a server, asked for the {config.distill.top} likeliest tokens at each position; all others count as one"
        return TeacherFacts(path, None, why)
    with _of_the_key():
        own_base, saved = resolve_folder(path, None, weights=False), None
        if is_adapter(own_base):
            own_base, saved = find_parts(path, None)
    trained = saved.folder if saved else own_base
    folder = trained if (trained / "tokenizer.json").is_file() else own_base
    student, teacher = load_tokenizer(base), load_tokenizer(folder)
    if not same_ids(teacher, student):
        what = f"{path} has another tokenizer than the student, so its distributions are over other tokens"
        raise InputError(Fault(KEY, what, "name a model of the same family and vocabulary", code="SF-TOKENIZER"))
    facts = facts_of(own_base)
    rows = max(facts.vocab, saved.rows or 0) if saved else facts.vocab
    pads = (student.pad_token, config.tokenizer.pad)
    beyond = [text for text, number in student.get_vocab().items() if number >= rows and text not in pads]
    if beyond:
        what = f"{path} has {rows:,} token ids, and the student has more tokens (such as {min(beyond)!r})"
        raise InputError(Fault(KEY, what, "name a model of the same vocabulary", code="SF-TOKENIZER"))
    return TeacherFacts(path, facts)


def _stored_facts(config: RunConfig, path: str) -> TeacherFacts:
    if config.draws:
        what = f"{path} holds what a teacher said of the data's answers, not of those that the student will draw"
        fix = "name the teacher itself, or leave distill.on_policy out"
        raise InputError(Fault(KEY, what, fix, code="SF-CONFIG-CONFLICT"))
    facts = read_facts(path, KEY)
    why = f"the {facts.top} likeliest tokens at each position, stored from {facts.teacher}; all others count as one"
    return TeacherFacts(path, None, why)


def teacher_fingerprint(config: RunConfig) -> str:
    """Return what a resumed run recognizes its teacher by: a digest of what is stored, or of the weights, or the name
    of a server's model, whose numbers are compared later (`ServedTeacher.check_same`)."""
    path = str(config.distill.teacher)
    if is_address(path):
        return open_model(config).name
    return sha256_file(Path(path) / META) if is_stored(path) else weights_fingerprint(path)


@contextmanager
def _of_the_key() -> Iterator[None]:
    """Give faults inside the place of the config's key."""
    try:
        yield
    except SurefootError as error:
        raise type(error)([_at_key(fault) for fault in error.faults]) from None


def _at_key(fault: Fault) -> Fault:
    where = "" if fault.where.startswith("model.") else f"{fault.where} "  # another key
    return Fault(KEY, f"{where}{fault.what}", fault.fix, fault.code)


def open_teacher(config: RunConfig, plan: RunPlan, loaded: LoadedModels, notify: Notify) -> Teacher:
    """Open the teacher as planned, on the student's device."""
    path = config.distill.teacher
    assert path is not None
    with _of_the_key():
        opened = open_for_use(path, held=frozen_type(plan), in_run=True)
    for caution in opened.cautions:
        notify(f"teacher: {caution}")
    if opened.plan is not None and opened.tokens.template.value != plan.tokenizer.template.value:
        names = f"{opened.tokens.template.value}, and this run uses {plan.tokenizer.template.value}"
        notify(f"the teacher was trained with the template {names}: it has not seen such prompts")
    model = opened.model.to(loaded.engine.device).eval().requires_grad_(False)
    packs = install_paths(model, plan, loaded.policy, facts_of(opened.base).window, notify)
    pad_id, chunked = None if packs else plan.tokenizer.pad_id, plan.kernels.loss.value != PLAIN
    return teacher_of(model, student_rows(loaded.policy), pad_id, chunked=chunked)


@dataclass(frozen=True)
class Alone:
    """A teacher without a student. context: of its forward passes."""

    teacher: Teacher
    device: torch.device
    context: Callable[[], AbstractContextManager[object]]


def open_alone(config: RunConfig, rows: int, say: Callable[[str], None]) -> Alone:
    """Open the teacher alone, in its own type.

    rows: token ids of the student.
    say: called with cautions.
    """
    path = config.distill.teacher
    assert path is not None
    with _of_the_key():
        opened = open_for_use(path)
    for caution in opened.cautions:
        say(f"caution: teacher: {caution}")
    model = opened.model.requires_grad_(False)
    return Alone(teacher_of(model, rows), next(model.parameters()).device, opened.context)


def student_rows(policy: nn.Module) -> int:
    """Number of token ids that the student distributes probability over."""
    return causal_model(policy).config.get_text_config().vocab_size


def install_paths(model: nn.Module, plan: RunPlan, policy: nn.Module, window: int | None, notify: Notify) -> bool:
    """Install the student's fast paths in the teacher; return whether it takes packed rows.

    window: tokens that the teacher's layers look back; None: all.
    """
    form, packs = plan.kernels.documents.value, False
    if form != PLAIN:
        why = documents_fault(model) if window is None else f"its layers look back {window} tokens"
        if why:
            notify(f"the teacher gets padded rows: {why}")
        else:
            packed_attention(form).install(model)
            packs = True
    if type(causal_model(model)) is type(causal_model(policy)):
        last = [last_block_path()] if plan.kernels.last_block.value == "pruned" else []
        for path in [*fused_paths(plan), *last]:
            if not path.obstacle(model):
                path.install(model)
    return packs or form == PLAIN


def teacher_of(model: nn.Module, rows: int, pad_id: int | None = None, *, chunked: bool = True) -> Teacher:
    """Return a model as the teacher.

    rows: token ids of the student.
    pad_id: fills rows that the teacher gets padded though the student's are packed; None: it takes them as they are.
    chunked: whether the student's head is computed outside of it. A model that changes its logits rounds them in its
        own type, the chunked head does not: equal models then have to take the same way.
    """
    apart = not head_obstacle(model) and (chunked or not changes_logits(model))
    head = own_head(model, 1) if apart else None
    words = min(rows, causal_model(model).config.get_text_config().vocab_size)

    def teacher(batch: Batch, places: torch.Tensor) -> Whole:
        own = batch if pad_id is None else unpacked(batch, pad_id)
        if own is not batch:
            places, _ = supervised_places(own)
        with inference_mode(model):
            if head is None:
                return Whole(None, None, logits_at(model, own, places), words)
            hidden = hidden_at(model, own, places)
            # Here, under the student's autocast: where it is compared, there is none.
            return Whole(hidden.to(operand_type(hidden.dtype, hidden.device)), head, None, words)

    return teacher
