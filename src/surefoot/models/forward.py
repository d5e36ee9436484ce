"""The forward pass: logits only at the required positions, and attention within the documents of a packed row.

In instruction data about a tenth of the tokens are supervised. Applying the head only to these saves most of its
compute and nearly all of its memory, and each logit is the same dot product. The model's own forward runs, so its
changes to logits (Gemma 2 caps them, Granite divides them) apply; only the head's input is reduced.
`verify.verify_head` checks for each model that logits do not depend on other positions.

Packed rows: transformers looks up a layer's attention function in a registry, by a name in the config, and passes it
the keyword arguments of the model's forward. `register` adds a function that takes the documents and needs no mask. If
a family drops the keyword arguments, an error is raised; documents are never mixed. Calls without documents use SDPA
and its masks, as under transformers' own name.

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

_PREFIX = "surefoot_documents_"  # prefix of our names in transformers' attention registry
_packed: ContextVar[bool] = ContextVar("packed", default=False)


def register(form: str) -> str:
    """Add an implementation of packed attention to transformers' registry; return its name there.

    form: a key of `surefoot.kernels.packed_attention.FORMS`.
    """
    # transformers takes a name with "flash" in it for one of its own implementations.
    name = _PREFIX + form.replace("flash_attn", "package")
    AttentionInterface.register(name, _attention(FORMS[form]))
    AttentionMaskInterface.register(name, _mask)
    return name


def takes_documents(model: PreTrainedModel) -> bool:
    """Whether the model uses one of our packed attention functions."""
    return (model.config._attn_implementation or "").startswith(_PREFIX)


@contextmanager
def packed_forward() -> Iterator[None]:
    """Context in which no attention mask is made; every layer gets the documents instead."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    return None if _packed.get() else sdpa_mask(*args, **kwargs)


def _attention(attend: Attend) -> Any:
    """Wrap `attend` in transformers' interface: q [1, H, N, D], k and v [1, K, N, D] -> ([1, N, H, D], None)."""

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
                raise _lost("not passed on to the attention layer")
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
            )
        if dropout or others.get("softcap") is not None or others.get("s_aux") is not None:
            raise _lost("not supported with attention dropout, softcap or attention sinks")
        window = others.get("sliding_window")
        if window is not None and documents.longest > window:
            raise _lost(f"up to {documents.longest} tokens long, but the layer's sliding window is {window}")
        query, key, value = _as_autocast((query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, documents, scale).transpose(1, 2), None

    return forward


def _lost(what: str) -> EnvironmentFault:
    what = f"the documents of a packed row are {what}"
    return EnvironmentFault(Fault("data.packing", what, "set data.packing: off", code="SF-CONFIG-CONFLICT"))


def _as_autocast(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Cast to the dtype in which SDPA gets its inputs under autocast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


_read: ContextVar[torch.Tensor | None] = ContextVar("read", default=None)


def causal_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside `model` without wrappers (PEFT, a value head, an engine); modules injected
    by PEFT stay in place."""
    (found,) = language_models(model)
    return found


def language_models(model: nn.Module) -> list[PreTrainedModel]:
    """Return the outermost transformers models in `model`, each once, in the order of its children."""
    if isinstance(model, PreTrainedModel):
        return [model]
    found = [inner for child in model.children() for inner in language_models(child)]
    return list({id(inner): inner for inner in found}.values())


@torch.no_grad()
def short_pass(model: PreTrainedModel) -> Any:
    """Run the model on two tokens, to inspect its structure. Uses autocast where weights are in 16 bits: others
    (adapters) are in fp32."""
    device = next(model.parameters()).device
    narrow = next((one.dtype for one in model.parameters() if one.dtype in (torch.bfloat16, torch.float16)), None)
    with torch.autocast(device.type, dtype=narrow, enabled=narrow is not None):
        return model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False)


def hidden_states(model: nn.Module, batch: Batch, read: torch.Tensor | None = None) -> torch.Tensor:
    """Return the input of the output head, [B, T, H], after the final norm.

    read: positions that will be used, see `reading`; None for all.

    Do not compute logits from them: a model may do more than apply its head. The states are captured at the head's
    input, and the head then gets an empty input. The model's own forward is called rather than its decoder, because
    sharding engines gather the weights in that forward.
    """
    seen: list[torch.Tensor] = []

    def take(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        seen.append(inputs[0])
        return (inputs[0][:, :0],)

    # Before an engine's own hooks, which track the head's gradient: it will have none.
    hook = output_head(model).register_forward_pre_hook(take, prepend=True)
    try:
        with _as_packed(batch), reading(read):
            causal_model(model)(**model_inputs(model, batch))
    finally:
        hook.remove()
    return seen[0][:, : batch.input_ids.shape[1]]


def hidden_at(model: nn.Module, batch: Batch, places: torch.Tensor) -> torch.Tensor:
    """Return the hidden states [N, H] at `places`, N distinct indices into the B * T positions of the batch."""
    return hidden_states(model, batch, places).flatten(0, 1).index_select(0, places)


def logits_at(model: nn.Module, batch: Batch, places: torch.Tensor) -> torch.Tensor:
    """Return the model's logits [N, V] at `places`: N distinct indices into the B * T positions of the batch, row by
    row."""
    with _as_packed(batch):
        return narrowed_logits(model, places, **model_inputs(model, batch))


def narrowed_logits(model: nn.Module, places: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Return the logits [N, V] at `places` for any inputs of the model's forward."""
    with reading(places), _head_sees(model, places):
        return causal_model(model)(**inputs).logits.squeeze(0)


@contextmanager
def reading(places: torch.Tensor | None) -> Iterator[None]:
    """Context of a forward pass of which only the hidden states at `places` will be used: N distinct indices into its
    B * T positions. The others may be any finite values (`surefoot.models.fast.last_block`)."""
    token = _read.set(places)
    try:
        yield
    finally:
        _read.reset(token)


def rows_read() -> torch.Tensor | None:
    """Return the `places` of the running forward pass; None if all positions may be used."""
    return _read.get()


def model_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the arguments of the model's forward for a batch.

    Right-padded batches have no mask, so SDPA runs its causal kernels and no [T, T] mask exists. Left-padded batches
    have a mask, and positions count real tokens from 0. In a packed row positions restart at 0 in each document, and
    the documents are passed too; the row may be padded at its end to reuse cached kernels
    (`surefoot.kernels.operands`). Raises EnvironmentFault if the model's attention does not support documents."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
    if batch.documents:
        if not takes_documents(causal_model(model)):
            what = "this model's attention does not support packed rows with separate documents"
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
    """Return the image arguments of the model's forward. pixels: one entry per row; seen: as in `Batch`."""
    names = dict.fromkeys(name for own in pixels for name, _ in own)
    inputs = {name: _joined([dict(own)[name] for own in pixels if own]) for name in names}
    if kinds := _argument(type(causal_model(model)), "mm_token_type_ids", "token_type_ids"):
        inputs[kinds] = seen
    if crosses := _argument(type(causal_model(model)), "cross_attention_mask"):
        inputs[crosses] = _read_tiles(seen, inputs["aspect_ratio_mask"])
    return inputs


def _read_tiles(seen: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Return which tiles each token attends to, [B, T, P, t]: those of the pictures right before it. Pictures without a
    token between them are read together.

    seen: [B, T], 1 at pictures; every row has P of them.
    tiles: [B, P, t], 1 at the tiles that a picture has.
    """
    number = seen.cumsum(dim=1)  # of pictures up to a token
    begins = seen * (1 - F.pad(seen, (1, 0))[:, :-1])
    group = begins.cumsum(dim=1)
    places = torch.arange(tiles.shape[1], device=seen.device)
    first = (number[:, :, None] > places).int().argmax(dim=1)  # [B, P] where each picture stands
    read = (group[:, :, None] == group.gather(1, first)[:, None]) & (number[:, :, None] > places)
    return read[..., None] * tiles[:, None]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along dim 0; smaller tensors are zero-padded at the end of other dims, as transformers' processors
    do."""
    sides = [max(sizes) for sizes in zip(*(one.shape[1:] for one in tensors), strict=True)]
    return torch.cat([_padded(one, sides) for one in tensors])


def _padded(tensor: torch.Tensor, sides: Sequence[int]) -> torch.Tensor:
    more = [side - own for side, own in zip(sides, tensor.shape[1:], strict=True)]
    return F.pad(tensor, [amount for one in reversed(more) for amount in (0, one)]) if any(more) else tensor


@functools.cache
def _argument(kind: type[nn.Module], *names: str) -> str:
    """Return the first of `names` that the forward of a model class takes; "" if it takes none. `mm_token_type_ids` and
    `token_type_ids` mark image tokens (for positions and bidirectional attention between them)."""
    taken = inspect.signature(kind.forward).parameters
    return next((name for name in names if name in taken), "")


def _filling(model: nn.Module, batch: Batch) -> list[int]:
    """Return the lengths of padding documents for a packed row; none longer than its real ones, for sliding windows."""
    device = batch.input_ids.device
    tokens, longest = batch.input_ids.shape[1], max(batch.documents)
    more = round_up_rows(tokens, operand_type(causal_model(model).dtype, device), device) - tokens
    return [min(longest, more - begin) for begin in range(0, more, longest)]


def _as_packed(batch: Batch) -> AbstractContextManager[object]:
    return packed_forward() if batch.documents else nullcontext()


@contextmanager
def _head_sees(model: nn.Module, places: torch.Tensor) -> Iterator[None]:
    """Context in which the output head's input [B, T, H] is reduced to [1, N, H]."""

    def narrow(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (inputs[0].flatten(0, 1).index_select(0, places).unsqueeze(0),)

    hook = output_head(model).register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        hook.remove()


def positions_from_mask(mask: torch.Tensor) -> torch.Tensor:
    """Convert a mask of real tokens [B, T] to their positions from 0; left padding gets 0."""
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def output_head(model: nn.Module) -> nn.Module:
    """Return the module that maps [..., H] to logits [..., V]."""
    head = causal_model(model).get_output_embeddings()
    assert head is not None, "a causal language model has an output head"
    return head
