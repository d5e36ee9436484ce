"""The forward pass: logits only at the positions that are needed, and documents of a packed row kept apart.

Instruction data supervises a tenth of its tokens. A head applied to those alone saves most of its arithmetic and
nearly all of its memory, and each logit is the same dot product as before. The model's own forward runs, so whatever
it does to logits (Gemma 2 caps them, Granite divides them) is done; only the head's input is narrowed on its way in.
`verify.verify_head` checks, for the model at hand, that the others do not matter to what is left.

Packed rows: transformers looks up a layer's attention function in a registry, by a name in the config, and passes on
the keywords that the model's forward was called with. `register` puts a function there that takes the documents and
makes no mask. A family that drops keywords on the way raises; it never mixes documents. Calls without documents go
through SDPA and its masks, as under transformers' own name.

Shapes: B examples, T tokens, N positions needed, H hidden size, V vocabulary, h query and K key heads of D numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from surefoot.data.batching.batch import Batch, Pixels, position_ids
from surefoot.kernels.operands import operand_type, round_up_rows
from surefoot.kernels.packed_attention import FORMS, Attend, Documents, documents_of
from surefoot.system.errors import EnvironmentFault, Fault

_PREFIX = "surefoot_documents_"  # of the form's name, among transformers' attention functions
_packed: ContextVar[bool] = ContextVar("packed", default=False)


def register(form: str) -> str:
    """Add a form of packed attention to transformers' registry; returns its name there.

    form: a key of `surefoot.kernels.packed_attention.FORMS`.
    """
    name = _PREFIX + form
    AttentionInterface.register(name, _attention(FORMS[form]))
    AttentionMaskInterface.register(name, _mask)
    return name


def takes_documents(model: PreTrainedModel) -> bool:
    """Whether an attention function of ours is in force in the model."""
    return (model.config._attn_implementation or "").startswith(_PREFIX)


@contextmanager
def packed_forward() -> Iterator[None]:
    """Inside, no mask is made: the documents themselves go to every layer."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _packed.get() else sdpa_mask(*args, **kwargs)


def _attention(attend: Attend) -> Any:
    """As transformers calls it: q [1, H, N, D], k and v [1, K, N, D] -> [1, N, H, D], and no probabilities."""

    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        documents: Documents | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        if documents is None:
            if _packed.get():
                raise _lost("lost on the way to the layer")
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
            )
        if dropout or others.get("softcap") is not None or others.get("s_aux") is not None:
            raise _lost("given to a layer that drops, caps or adds to its attention")
        window = others.get("sliding_window")
        if window is not None and documents.longest > window:
            raise _lost(f"of up to {documents.longest} tokens, and the layer sees {window}")
        query, key, value = _as_autocast((query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, documents, scale).transpose(1, 2), None

    return forward


def _lost(what: str) -> EnvironmentFault:
    what = f"the documents of a packed row are {what}"
    return EnvironmentFault(Fault("data.packing", what, "set data.packing: off", code="SF-CONFIG-CONFLICT"))


def _as_autocast(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """In the type that autocast gives SDPA its inputs in."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


_read: ContextVar[torch.Tensor | None] = ContextVar("read", default=None)


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The one transformers model in `model`, whatever is around it (PEFT, a value head, an engine's wrapper); modules
    that PEFT injected stay in place."""
    (found,) = language_models(model)
    return found


def language_models(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in `model`, outermost ones only, each once, in the order of its children."""
    if isinstance(model, PreTrainedModel):
        return [model]
    found = [inner for child in model.children() for inner in language_models(child)]
    return list({id(inner): inner for inner in found}.values())


@torch.no_grad()
def short_pass(model: PreTrainedModel) -> Any:
    """The model's output for two tokens, to see how it is built. Under autocast where the base is held in 16 bits, as
    its adapters are fp32 nevertheless."""
    first = next(model.parameters())
    mixed = first.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(first.device.type, dtype=first.dtype if mixed else None, enabled=mixed):
        return model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=first.device), use_cache=False)


def hidden_states(model: nn.Module, batch: Batch, read: torch.Tensor | None = None) -> torch.Tensor:
    """What the output head sees: [B, T, H], after the final norm.

    read: see `reading`; None: all of them.

    Not what to compute logits from: a model may do more than apply its head to them. They are taken on their way into
    the head, which then gets none of them, because an engine that shards a model gathers it when the model's own
    forward is called, and not when its decoder is.
    """
    seen: list[torch.Tensor] = []

    def take(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        seen.append(inputs[0])
        return (inputs[0][:, :0],)

    # In front of hooks that an engine put there to follow the head's gradient, which will have none.
    hook = output_head(model).register_forward_pre_hook(take, prepend=True)
    try:
        with _as_packed(batch), reading(read):
            causal_model(model)(**model_inputs(model, batch))
    finally:
        hook.remove()
    return seen[0][:, : batch.input_ids.shape[1]]


def hidden_at(model: nn.Module, batch: Batch, places: torch.Tensor) -> torch.Tensor:
    """The same at `places` alone, N indices into the B * T positions of the batch, each once: [N, H]."""
    return hidden_states(model, batch, places).flatten(0, 1).index_select(0, places)


def logits_at(model: nn.Module, batch: Batch, places: torch.Tensor) -> torch.Tensor:
    """The model's own logits [N, V] at `places`: N indices into the B * T positions of the batch, row by row, each
    once."""
    with _as_packed(batch):
        return narrowed_logits(model, places, **model_inputs(model, batch))


def narrowed_logits(model: nn.Module, places: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The same for any inputs of the model's forward."""
    with reading(places), _head_sees(model, places):
        return causal_model(model)(**inputs).logits.squeeze(0)


@contextmanager
def reading(places: torch.Tensor | None) -> Iterator[None]:
    """Inside, of the hidden states [B, T, H] of one forward pass only those at `places` are looked at: N indices into
    its B * T positions, each once. Others may be anything finite (`surefoot.models.fast.last_block`)."""
    token = _read.set(places)
    try:
        yield
    finally:
        _read.reset(token)


def rows_read() -> torch.Tensor | None:
    """The places of the forward pass that is running; None where all may be looked at."""
    return _read.get()


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Without a mask (right padding) none is passed on, so SDPA runs its causal kernels and no [T, T] mask exists.
    With one (left padding) positions count real tokens from 0, as they would without padding. In a packed row they
    begin at 0 again in each document, and the documents go along; the row may end with filling that is not read, so
    that its products find their kernels (`surefoot.kernels.operands`). Raises EnvironmentFault where nothing would take
    them."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
    if batch.documents:
        if not takes_documents(causal_model(model)):
            what = "this model's attention does not keep the documents of a packed row apart"
            raise EnvironmentFault(Fault("data.packing", what, "set data.packing: off", code="SF-CONFIG-CONFLICT"))
        filling = _filling(model, batch)
        documents = (*batch.documents, *filling)
        inputs["input_ids"] = F.pad(batch.input_ids, (0, sum(filling)))
        inputs["position_ids"] = position_ids(documents, batch.input_ids.device)
        inputs["documents"] = documents_of(documents, batch.input_ids.device)
    elif batch.attention_mask is not None:
        inputs["position_ids"] = positions_from_mask(batch.attention_mask)
    if batch.pixels:
        assert batch.seen is not None, "rows with pixels say where their features stand"
        inputs |= picture_inputs(model, batch.pixels, batch.seen)
    return inputs


def picture_inputs(model: nn.Module, pixels: Sequence[Pixels], seen: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model's forward takes besides token ids. pixels: of each row. seen: as in `Batch`."""
    names = dict.fromkeys(name for own in pixels for name, _ in own)
    inputs = {name: _joined([dict(own)[name] for own in pixels if own]) for name in names}
    if kinds := _kinds_argument(type(causal_model(model))):
        inputs[kinds] = seen
    return inputs


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other; smaller ones get zeros behind their sides, as transformers' processors put them there."""
    sides = [max(sizes) for sizes in zip(*(one.shape[1:] for one in tensors), strict=True)]
    return torch.cat([_padded(one, sides) for one in tensors])


def _padded(tensor: torch.Tensor, sides: Sequence[int]) -> torch.Tensor:
    more = [side - own for side, own in zip(sides, tensor.shape[1:], strict=True)]
    return F.pad(tensor, [amount for one in reversed(more) for amount in (0, one)]) if any(more) else tensor


@functools.cache
def _kinds_argument(kind: type[nn.Module]) -> str:
    """By which argument a model's forward takes where features of pictures stand: for their places, and for attention
    both ways between them. Empty where it asks for none."""
    names = inspect.signature(kind.forward).parameters
    return next((name for name in ("mm_token_type_ids", "token_type_ids") if name in names), "")


def _filling(model: nn.Module, batch: Batch) -> list[int]:
    """Tokens of documents to end a packed row with, none of them longer than its own, which a window may limit."""
    device = batch.input_ids.device
    tokens, longest = batch.input_ids.shape[1], max(batch.documents)
    more = round_up_rows(tokens, operand_type(causal_model(model).dtype, device), device) - tokens
    return [min(longest, more - begin) for begin in range(0, more, longest)]


def _as_packed(batch: Batch) -> AbstractContextManager[object]:
    return packed_forward() if batch.documents else nullcontext()


@contextmanager
def _head_sees(model: nn.Module, places: torch.Tensor) -> Iterator[None]:
    """Inside, the output head gets [1, N, H] of the [B, T, H] that it is called with."""

    def narrow(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (inputs[0].flatten(0, 1).index_select(0, places).unsqueeze(0),)

    hook = output_head(model).register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        hook.remove()


def positions_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """[B, T] mask of real tokens -> their positions from 0; padding in front gets 0."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def output_head(model: nn.Module) -> nn.Module:
    """The module that maps [..., H] to logits [..., V]."""
    head = causal_model(model).get_output_embeddings()
    assert head is not None, "a causal language model has an output head"
    return head
