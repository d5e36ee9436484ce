"""Open whatever a user names: base model, adapter, run, checkpoint or merged model (`open_reward`: reward model).

    opened = open_for_use("runs/one")               # ready to generate

A run folder's plan.json records how its model was trained: template, BOS, stop tokens, dtype. For other models the
planner decides as it would before training, so that a model is prompted the same way before and after.

An adapter over a base with other weights is an experiment and gives a caution (`provenance`); a base with another
vocabulary is refused, because every id would be another token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import BosConfig, ModelConfig, RunConfig
from surefoot.config.sections import DataConfig, SourceConfig
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.picture_processor import read_processor, with_pictures
from surefoot.data.tokenize.segments import Template, TextEncoder, encode_runs, prompt_ids, text_ids
from surefoot.families.bos_zero import BOS_FILE, FACTOR, read_bos_scale
from surefoot.families.model_facts import ModelFacts
from surefoot.families.templates import OWN, is_users_own
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.methods.provenance import cautions_about, recorded_base, require_weights, saved_config, saved_plan
from surefoot.models.bos import install_bos_scaling
from surefoot.models.facts import facts_of
from surefoot.models.folder import require_adapter, resolve_folder
from surefoot.models.generate import Pictures, pictures_of
from surefoot.models.load import layout_message, load_model, load_tokenizer
from surefoot.models.precision import TORCH_DTYPE, quantize
from surefoot.models.qat import round_weights
from surefoot.models.saved_adapter import SavedAdapter, fitted, is_adapter, open_adapter, read_adapter
from surefoot.models.value_head import has_value_head
from surefoot.planning.environment import plan_threads
from surefoot.planning.notes import Notes
from surefoot.planning.plan import OFF, QAT_BLOCKS, DType, PackedType, RunPlan, TokenizerPlan
from surefoot.planning.tokenizer import plan_tokenizer
from surefoot.system import hardware, process
from surefoot.system.errors import Fault, InputError
from surefoot.system.hardware import Hardware
from surefoot.system.libraries import bitsandbytes_obstacle, torchao_obstacle


@dataclass(frozen=True)
class OpenModel:
    """A model with everything needed to prompt it.

    model: in eval mode.
    positions: maximum sequence length.
    context: context manager for generation.
    named: what was opened.
    held: dtype and device, for messages.
    cautions: differences from what a run left.
    base: folder of the base model.
    trained: folder of the adapter, or `base` without one.
    tokens: template, BOS and stop tokens.
    plan: plan of the run that wrote `trained`; None if surefoot did not.
    bos_scale: factor of the first embedding of every sequence; the model already applies it.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    encoder: TextEncoder
    template: Template
    bos_id: int | None
    pad_id: int
    positions: int
    context: Callable[[], AbstractContextManager[object]]
    named: str
    held: str
    cautions: tuple[str, ...]
    base: Path
    trained: Path
    tokens: TokenizerPlan
    plan: RunPlan | None
    bos_scale: float

    @property
    def described(self) -> str:
        """Describe in one line what was opened and how it is prompted."""
        scaled = f", first embedding times {self.bos_scale:g}" if self.bos_scale != 1 else ""
        template = self.tokens.template
        return f"{self.named}, {self.held}{scaled}, template {template.value} ({template.reason})"


def open_for_use(
    path: str, adapter: str | None = None, *, scored: bool = False, held: DType | None = None, in_run: bool = False
) -> OpenModel:
    """Open a model or adapter for generation or measurement.

    path: folder or hub id of a model, or of an adapter, which records its base.
    adapter: an adapter to put over `path`.
    scored: nothing will be generated, so it may be a reward model.
    held: dtype of the base; None: as in training, if this machine computes in it.
    in_run: a run is under way, whose plan has set the number of threads; else it is set here, by the same rule.

    Raises InputError for a damaged model, an adapter whose base is not found, or a reward model if `scored` is false;
    EnvironmentFault if the hub cannot provide it.
    """
    base, saved = find_parts(path, adapter)
    trained = saved.folder if saved else base
    plan = saved_plan(trained)
    if not scored and has_value_head(trained):  # exported models too, which have no plan
        what = "is a reward model: it scores answers and writes none"
        raise InputError(Fault(adapter or path, what, "run: surefoot evaluate reward MODEL DATA", code="SF-MODEL-KIND"))
    notes = list(cautions_about(trained, base))
    if saved and saved.layouts:
        notes.append(layout_message(saved.folder, saved.layouts))
    scale = saved_bos_scale(trained, base, plan)
    facts = replace(facts_of(base), bos_scale=scale)
    with_tokenizer, tokens = find_tokens(path, trained, base, facts, plan)
    machine = hardware.detect()
    if not in_run:
        torch.set_num_threads(plan_threads(facts, machine, process.read_environment()).value)
    dtype = held or _dtype(plan.precision.unpacked if plan else facts.stored, machine)
    trained_over = plan.precision.packed if plan else None
    obstacle = bitsandbytes_obstacle(machine.kind) if trained_over else ""
    packed = None if obstacle else trained_over
    device = torch.device(machine.kind)
    base_model = load_model(
        base,
        dtype=TORCH_DTYPE[dtype],
        attention_implementation="eager" if facts.without_sdpa else "sdpa",
        device=torch.device("cpu") if packed else device,
        vocab_rows=saved.rows if saved else None,
        notify=notes.append,
        scored=scored and has_value_head(base),
    )
    if packed:
        quantize(base_model, packed, compute=TORCH_DTYPE[dtype], device=device)
    if (qat := plan.precision.qat.value if plan else OFF) != OFF:
        if obstacle_to_qat := "" if qat in QAT_BLOCKS else torchao_obstacle():
            notes.append(f"its weights are not rounded as they were in training: {qat} {obstacle_to_qat}")
        else:
            round_weights(base_model, qat, plan.precision.qat_group if plan else None)
    model = open_adapter(base_model, saved) if saved else base_model
    install_bos_scaling(model, scale)
    encoder = TextEncoder(load_tokenizer(with_tokenizer))
    over = f" with the adapter {adapter or path}" if saved else ""
    return OpenModel(
        model=model,
        tokenizer=encoder.tokenizer,
        encoder=encoder,
        template=make_template(template_name(tokens), encoder, tokens.stop.value),
        bos_id=tokens.bos_id if tokens.bos.value else None,
        pad_id=tokens.pad_id,
        positions=facts.max_positions,
        context=lambda: nullcontext() if dtype == "fp32" else torch.autocast(machine.kind, dtype=TORCH_DTYPE[dtype]),
        named=f"{path if not saved or adapter else saved.base}{over}",
        held=f"{_held(dtype, trained_over, obstacle)} on {machine.kind}",
        cautions=tuple(notes),
        base=base,
        trained=trained,
        tokens=tokens,
        plan=plan,
        bos_scale=scale,
    )


def conversation_ids(opened: OpenModel, turns: Sequence[Turn]) -> list[int]:
    """Return the token ids of the prompt. Raises InputError if the template cannot render the turns."""
    try:
        return prompt_ids(Conversation(tuple(turns)), opened.template, opened.encoder, opened.bos_id)
    except RowFault as fault:
        raise InputError(Fault("prompt", fault.what, fault.fix, code="SF-DATA-TEMPLATE")) from None


@dataclass(frozen=True)
class Question:
    """The model's input for its next answer.

    ids: tokens of the conversation.
    pictures: image inputs of its forward; None without images.
    """

    ids: list[int]
    pictures: Pictures | None = None


def question_of(opened: OpenModel, turns: Sequence[Turn]) -> Question:
    """Like `conversation_ids`, with the images of the turns. Raises InputError for an unreadable image, or a model
    without vision."""
    if not any(turn.images for turn in turns):
        return Question(conversation_ids(opened, turns))
    config = saved_config(opened.trained)
    processor = read_processor(
        opened.tokenizer.name_or_path, opened.encoder, config.data.max_pixels if config else None
    )
    if processor is None:
        what = f"{opened.named} is not a model whose pictures surefoot reads"
        raise InputError(Fault("--image", what, "leave the picture out", code="SF-DATA-PICTURE"))
    try:
        conversation = with_pictures(Conversation(tuple(turns)), lambda path: processor.look(path, Path()))
        layout = processor.spread(opened.template.segments(conversation), conversation.pictures)
    except RowFault as fault:
        fix = "name another file" if fault.code == "SF-DATA-PICTURE" else fault.fix
        raise InputError(Fault("prompt", fault.what, fix, code=fault.code)) from None
    (runs,) = encode_runs([layout], opened.encoder, opened.bos_id)
    ids = [number for run in runs for number in run.ids]
    return Question(ids, pictures_of(opened.model, ids, processor.pixels(conversation.pictures), processor.token_id))


def raw_ids(opened: OpenModel, text: str) -> list[int]:
    """Return `text_ids`, with BOS if the model uses one."""
    ids = text_ids(text, opened.encoder, opened.bos_id)
    if not ids:
        raise InputError(
            Fault(
                "prompt",
                "is empty, and this model begins with no token of its own",
                "write something",
                code="SF-DATA-EMPTY",
            )
        )
    return ids


def room_for(opened: OpenModel, prompts: Sequence[Sequence[int]], wanted: int | None, usual: int = 256) -> int:
    """Return the number of new tokens: `wanted`, or up to `usual`. Raises InputError if they do not fit."""
    longest = max(map(len, prompts))
    free = opened.positions - longest
    if free < (wanted or 1):
        what = f"{longest} tokens and {wanted or 1} new ones are more than the model's {opened.positions} positions"
        raise InputError(Fault("prompt", what, "shorten it, or lower --max-new-tokens", code="SF-DATA-LENGTH"))
    return wanted or min(usual, free)


def find_parts(path: str, adapter: str | None) -> tuple[Path, SavedAdapter | None]:
    """Return the folder of the model, and the adapter fitted to it. Raises InputError for an adapter of another model
    or tokenizer."""
    folder = resolve_folder(path, None, weights=True)
    require_weights(folder, path)
    if adapter is not None:
        over = resolve_folder(adapter, None, weights=True)
        require_weights(over, adapter)
        require_adapter(over, adapter)
        saved, base = read_adapter(over), folder
    elif is_adapter(folder):
        saved = read_adapter(folder)
        base = recorded_base(path, folder, saved.base, saved.revision)
    else:
        return folder, None
    facts = facts_of(base)
    saved = fitted(saved, facts)
    require_same_tokens(saved, base, facts.vocab)
    return base, saved


def saved_bos_scale(trained: Path, base: Path, plan: RunPlan | None) -> float:
    """Return the factor of the first embedding of every sequence in training; 1 for none.

    trained: run, checkpoint or adapter.
    base: the model under it, or the same folder. It decides for adapters of other tools that record nothing.

    Raises InputError for a file without the factor, and if a run's file is missing or contradicts its plan.
    """
    own = read_bos_scale(trained)
    planned = 1.0 if plan is None else plan.tokenizer.bos_scale.value
    if own is not None and plan is not None and own != planned:
        what = f"is {own:g}, and the model was trained with bos.scale {planned:g}, as plan.json says"
        fix = f"write {planned:g} into it: with another factor answers make no sense"
        raise InputError(Fault(f"{trained / BOS_FILE}: {FACTOR}", what, fix, code="SF-BOS"))
    if own is not None:
        return own
    if planned != 1:
        what = f"is missing, and the model was trained with bos.scale {planned:g}"
        raise InputError(
            Fault(str(trained / BOS_FILE), what, "restore it: without the factor answers make no sense", code="SF-BOS")
        )
    under = None if plan is not None else read_bos_scale(base)
    return 1.0 if under is None else under


def template_name(tokens: TokenizerPlan) -> str:
    """Return the template's name; a run with its own template file has saved it as the tokenizer's template."""
    return OWN if is_users_own(tokens.template.value) else tokens.template.value


def plan_tokens(path: str, facts: ModelFacts, folder: Path) -> TokenizerPlan:
    """Plan the tokenizer of a model that was not trained by surefoot.

    folder: folder of the tokenizer.
    """
    data = DataConfig(train=(SourceConfig(path="none"),))
    scale = facts.bos_scale
    bos = BosConfig() if scale is None else BosConfig(scale=scale)
    config = RunConfig(stage="sft", model=ModelConfig(path=path), data=data, bos=bos, output="none")
    notes = Notes()
    tokens = plan_tokenizer(config, facts, read_tokenizer_facts(folder), notes)
    if notes.faults:
        raise InputError(notes.faults)
    return tokens


def find_tokens(
    path: str, trained: Path, base: Path, facts: ModelFacts, plan: RunPlan | None
) -> tuple[Path, TokenizerPlan]:
    """Return the folder of the model's tokenizer, and the tokenizer plan: the run's that wrote `trained`, or the
    planner's for other models.

    path: the model as named by the user.
    """
    folder = trained if (trained / "tokenizer.json").is_file() else base
    return folder, plan.tokenizer if plan else plan_tokens(path, facts, folder)


def _held(dtype: DType, trained_over: PackedType | None, obstacle: str) -> str:
    """Describe the base's dtype. An adapter trained over a quantized base also works over the unquantized one."""
    if trained_over is None:
        return dtype
    if obstacle:
        return f"{dtype} (it was trained over {trained_over}, which {obstacle})"
    return f"{trained_over} and {dtype}"


def _dtype(stored: DType, machine: Hardware) -> DType:
    """The stored dtype if this machine computes in it, else fp32."""
    fast = {"fp32": True, "bf16": machine.bf16, "fp16": machine.fp16 and machine.kind != "cpu"}
    return stored if fast[stored] else "fp32"


_FILE = "tokenizer.json"


def require_same_tokens(saved: SavedAdapter, base: Path, rows: int) -> None:
    """Raise InputError if the adapter has its own tokenizer and the base's ids are other tokens. Unused reserved tokens
    may have other names, as between Llama 3 and Llama 3.1.

    rows: rows of the base's embedding; further ones belong to the adapter.
    """
    files = saved.folder / _FILE, base / _FILE
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    own = load_tokenizer(saved.folder)
    there = {number: text for text, number in load_tokenizer(base).get_vocab().items()}
    brought = range(rows, saved.rows or 0)
    for text, number in _written(own, saved_plan(saved.folder)):
        if there.get(number) != text and number not in brought:
            named = f"is {there[number]!r}" if number in there else "does not exist"
            what = f"was trained with another tokenizer: its token {number}, {text!r}, {named} in {base}"
            raise InputError(
                Fault(str(saved.folder), what, "put it over the model that it was trained over", code="SF-TOKENIZER")
            )


def _written(own: PreTrainedTokenizerBase, plan: RunPlan | None) -> list[tuple[str, int]]:
    """Tokens that training may have used, with their ids: ordinary ones, and special ones that begin and end texts or
    are in the chat template."""
    added = own.added_tokens_decoder
    named = [own.bos_token, own.eos_token]
    marks = {number for number, token in added.items() if token.content in str(own.chat_template)}
    marks |= set(plan.tokenizer.stop.value) if plan else set()
    marks |= {plan.tokenizer.bos_id} if plan and plan.tokenizer.bos_id is not None else set()
    return [
        (text, number)
        for text, number in own.get_vocab().items()
        if number not in added or number in marks or text in named
    ]
