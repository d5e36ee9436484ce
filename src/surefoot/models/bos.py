"""BOS scaling (an experiment): multiply the embedding of each sequence's first token by a factor, and verify it.

    e'_t = s e_t where t is the first attended token of a sequence, e'_t = e_t elsewhere

    scaling = install_bos_scaling(model, 0.1)   # before the first forward pass of a compiled model
    verify_bos_scaling(model, batch, 0.1)       # measures the input of the first decoder layer on a batch of the run
    scaling.remove()

It applies in training and inference, whenever the model's decoder runs: to the token embedding only (learned position
embeddings are added later), after NEFTune noise. The decoder gets embeddings instead of ids, so nothing is saved with
the weights and there is no state between calls: the starts of sequences follow from mask, positions and cache.

With s = 0 the residual stream of that token is exactly zero in all layers of a model without biases. There every norm
divides the gradient by sqrt(eps): after about sixteen layers it is infinite, and 0 times infinity is NaN. No parameter
gradient depends on that stream, because it is multiplied by zero, so the gradient is cut after every layer: the result
is the same (tested against float64) and finite. Every forward pass checks for every sequence whether the stream is
zero; if it is not, or if a bias is trainable that would change it, the gradient is not cut.

Shapes: B rows, T tokens of this call, S tokens with those in the cache, H width.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from surefoot.data.batching.batch import Batch, numbers_on
from surefoot.models.decoder import decoder_layers, decoder_of
from surefoot.models.embeddings import embedding_and_head, is_tied
from surefoot.models.forward import causal_model, hidden_states, model_inputs, packed_forward
from surefoot.models.modes import eager_mode, eval_mode
from surefoot.system.errors import EnvironmentFault, Fault, InputError

_INSTALLED = "_surefoot_bos_scaling"  # attribute of the decoder, so that a copy of the model has its own


class BosScaling:
    """The installed scaling of a model.

    scale: current factor; may be changed.
    """

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, scale: float) -> None:
        self.scale = scale
        self._decoder = decoder
        self._names = tuple(inspect.signature(decoder.forward).parameters)
        self._cuts = not _trains_a_bias(decoder)
        self._starts: torch.Tensor | None = None
        self._handles: list[RemovableHandle] = [
            decoder.register_forward_pre_hook(self._enter, with_kwargs=True),
            decoder.register_forward_hook(self._leave),
            # After every layer, not only the first, because in backward each norm divides by sqrt(eps) again.
            *(layer.register_forward_hook(self._cut) for layer in layers),
        ]
        setattr(decoder, _INSTALLED, self)

    def remove(self) -> None:
        """Restore the model. May be called repeatedly."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if getattr(self._decoder, _INSTALLED, None) is self:
            delattr(self._decoder, _INSTALLED)

    def _enter(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        if self.scale == 1:  # `other_scale`
            return None
        inputs = dict(zip(self._names, args, strict=False)) | kwargs
        ids, embedded = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if (ids is None) == (embedded is None):
            return None  # the model itself raises the error
        if embedded is None:
            embedded = decoder.get_input_embeddings()(ids)  # type: ignore[operator]
        starts = sequence_starts(
            embedded, inputs.get("attention_mask"), inputs.get("position_ids"), inputs.get("past_key_values")
        )
        # With another factor the stream is not zero, so its gradient is needed.
        self._starts = starts if self.scale == 0 and self._cuts else None
        return (), inputs | {"input_ids": None, "inputs_embeds": _scaled(embedded, starts, self.scale)}

    def _cut(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """Cut the gradient at a layer's output. Hooks run outside of checkpointing, which wraps only the forward."""
        if self._starts is None or not torch.is_grad_enabled():
            return None
        if isinstance(output, tuple):
            return (_cut_where_zero(output[0], self._starts), *output[1:])
        return _cut_where_zero(output, self._starts)

    def _leave(self, decoder: nn.Module, args: Any, output: Any) -> None:
        self._starts = None


def install_bos_scaling(model: nn.Module, scale: float) -> BosScaling | None:
    """Install the scaling, replacing an existing one. Returns None for a scale of 1, which removes the scaling.

    model: a transformers or PEFT model, possibly wrapped by DDP or torch.compile. Adapters and requires_grad must be
        set before.

    Raises ValueError for a scale that is negative or not finite, EnvironmentFault for a model that does not accept
    embeddings instead of ids.
    """
    if not 0 <= scale < float("inf"):
        raise ValueError(f"a scale is a finite number of at least 0, not {scale}")
    found = installed_scaling(model)
    if found is not None:
        found.remove()
    if scale == 1:
        return None
    inner = unwrapped(model)
    decoder = decoder_of(inner)
    if "inputs_embeds" not in inspect.signature(decoder.forward).parameters:
        what = "accepts only token ids, so its embeddings cannot be scaled"
        raise EnvironmentFault(Fault(type(inner).__name__, what, "leave bos.scale out", code="SF-BOS"))
    return BosScaling(decoder, decoder_layers(inner), scale)


def installed_scaling(model: nn.Module) -> BosScaling | None:
    return getattr(decoder_of(unwrapped(model)), _INSTALLED, None)


@contextmanager
def other_scale(scaling: BosScaling, scale: float) -> Iterator[None]:
    """Context with another factor. Has no effect on compiled code, which keeps the factor it was compiled with."""
    own, scaling.scale = scaling.scale, scale
    try:
        yield
    finally:
        scaling.scale = own


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside the wrappers of DDP, torch.compile and PEFT."""
    for name in ("_orig_mod", "module"):
        inner = model._modules.get(name)
        if inner is not None and len(model._modules) == 1:
            return unwrapped(inner)
    return causal_model(model)


def sequence_starts(
    embedded: torch.Tensor, mask: Any = None, positions: torch.Tensor | None = None, cache: Any = None
) -> torch.Tensor:
    """Return [B, T], True at the first attended token of every sequence among the T tokens of this call.

    embedded: [B, T, H].
    mask: [B, S], real tokens; or a prepared mask [B, 1, T, S], or a mapping of these by layer type; None: all are real.
    positions: [B, T] or [1, T]; 0 starts a document of a packed row.
    cache: transformers' cache; sequences in it have started before.

    Raises ValueError for a mask of another form.
    """
    rows, length = embedded.shape[:2]
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        attended = torch.ones((rows, length), dtype=torch.bool, device=embedded.device)
        first = attended & (_columns(embedded, cache) == 0)
    elif isinstance(mask, torch.Tensor) and mask.ndim == 2:
        real = mask.bool()
        attended = real[:, -length:]
        first = attended & (real.cumsum(dim=-1)[:, -length:] == 1)
    elif isinstance(mask, torch.Tensor) and mask.ndim == 4:
        seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0  # [B, T, S]; added to scores, 0 is seen
        own = _columns(embedded, cache)[None, :, None].expand(seen.shape[0], -1, 1)
        attended = seen.gather(2, own).squeeze(2)
        first = attended & (seen.sum(dim=-1) == 1)
    else:
        raise ValueError(f"bos.scale needs an attention mask of 2 or 4 dimensions, not {type(mask).__name__}")
    if positions is not None and positions.ndim == 2:
        first = first | (attended & (positions == 0))
    return first.expand(rows, -1)


def _columns(embedded: torch.Tensor, cache: Any) -> torch.Tensor:
    """Return [T], the position of each token of this call in its row, after the tokens in the cache."""
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(embedded.shape[1], device=embedded.device) + past


def _scaled(embedded: torch.Tensor, starts: torch.Tensor, scale: float) -> torch.Tensor:
    if scale == 0:  # not a product: an infinite gradient times 0 is NaN
        return embedded.masked_fill(starts[..., None], 0)
    return torch.where(starts[..., None], embedded * scale, embedded)


def _cut_where_zero(hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the same values [B, T, H], without gradient at sequence starts whose stream is zero."""
    zero = starts & (hidden == 0).all(dim=-1)
    return torch.where(zero[..., None], hidden.detach(), hidden)


def _trains_a_bias(decoder: nn.Module) -> bool:
    """Whether a trainable parameter is added to the stream (a bias or learned positions), which has a gradient even if
    the stream is zero. Parameters that multiply the stream have none."""
    words = decoder.get_input_embeddings()  # type: ignore[operator]
    tables = [module for module in decoder.modules() if isinstance(module, nn.Embedding)]
    inside = {id(module) for module in words.modules()}
    if any(p.requires_grad for table in tables if id(table) not in inside for p in table.parameters()):
        return True
    return any(
        parameter.requires_grad and ("bias" in leaf or (parameter.ndim == 1 and leaf != "weight"))
        for name, parameter in decoder.named_parameters()
        for leaf in [name.rpartition(".")[2]]
    )


def bake_obstacle(
    *, bos_id: int | None, ends: Collection[int], pad_id: int | None, tied: bool, repeats_bos: bool = False
) -> str:
    """Return why the factor cannot be baked into the embedding's BOS row, for a message; "" if it can.

    It requires that BOS occurs only at the start of sequences.

    ends: EOS and other ids that end an answer.
    tied: whether head and embedding are tied, so that the logit of BOS would be scaled too.
    repeats_bos: whether the template writes BOS before later turns too.
    """
    if bos_id is None:
        return "there is no BOS token, so the scaled token is another one each time"
    if bos_id in ends:
        return f"BOS (id {bos_id}) is EOS too, and the end of an answer would be scaled with it"
    if bos_id == pad_id:
        return f"BOS (id {bos_id}) is PAD too"
    if tied:
        return "the output head is tied to the embedding, and the logit of BOS would be scaled with it"
    if repeats_bos:
        return "the chat template writes BOS before later turns too, and those are not scaled"
    return ""


@torch.no_grad()
def bake(model: nn.Module, bos_id: int, scale: float) -> None:
    """Multiply the embedding's BOS row by `scale` and remove the model's scaling. Check `bake_obstacle` first.

    Raises InputError if the head is tied to the embedding.
    """
    inner = unwrapped(model)
    if is_tied(inner):
        what = bake_obstacle(bos_id=bos_id, ends=(), pad_id=None, tied=True)
        raise InputError(Fault("bos.scale", what, code="SF-BOS"))
    installed = installed_scaling(model)
    if installed is not None:
        installed.remove()
    embedding_and_head(inner)[0][bos_id] *= scale


# The measured factor is a mean over the hidden size of values that are rounded to the dtype of the weights.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@torch.no_grad()
def verify_bos_scaling(model: nn.Module, batch: Batch, scale: float) -> dict[str, Any]:
    """Check that the first layer gets the first token of each example scaled by `scale` and other tokens unchanged.
    Returns what was found, JSON-able; "factor" is [smallest, largest], or None if every first embedding is zero. Raises
    EnvironmentFault otherwise."""
    with eval_mode(model), eager_mode(model):  # without dropout, which differs between passes
        factors, zero, others = _measure(model, batch)
    tolerance = _TOLERANCE[unwrapped(model).get_input_embeddings().get_parameter("weight").dtype]
    wrong = [factor for factor in factors if not abs(factor - scale) <= tolerance * max(scale, 1)]
    differences = []
    if wrong:
        differences.append(f"planned {scale:g}, but the first layer gets the first token times {wrong[0]:.4g}")
    if others:
        differences.append(f"other tokens than the first of an example are changed, by up to {others:.2g}")
    if differences:
        fix = "this model cannot be trained with a scaled BOS"
        raise EnvironmentFault([Fault("plan: bos.scale", one, fix, code="SF-PLAN-BROKEN") for one in differences])
    return {
        "planned": scale,
        "factor": [min(factors), max(factors)] if factors else None,
        "sequences": len(factors),
        "left_out_as_zero": zero,
        "others_changed": 0.0,
    }


def _measure(model: nn.Module, batch: Batch) -> tuple[list[float], int, float]:
    """Return the factor of each first token, the number of those without (their embedding is zero), and the largest
    change of any other token. A factor is the least-squares fit of the scaled stream to the plain one."""
    scaling = installed_scaling(model)
    own = _first_layer_sees(model, batch)
    with nullcontext() if scaling is None else other_scale(scaling, 1.0):
        plain = _first_layer_sees(model, batch)
        # Learned positions are added after the scaling, so subtract the stream without the first embedding.
        none = _first_layer_sees(model, batch, zeroed=True)
    rows, columns = _first_places(batch)
    embedded = unwrapped(model).get_input_embeddings()(batch.input_ids[rows, columns])
    nonzero = (embedded != 0).any(dim=-1)
    rows, columns = rows[nonzero], columns[nonzero]
    whole, part = ((one - none)[rows, columns] for one in (plain, own))  # [those that are not zero, H]
    factors = (part * whole).sum(dim=-1) / (whole * whole).sum(dim=-1)
    rest = own - plain
    rest[rows, columns] = 0
    return [round(float(factor), 6) for factor in factors], int((~nonzero).sum()), float(rest.abs().max())


def _first_layer_sees(model: nn.Module, batch: Batch, *, zeroed: bool = False) -> torch.Tensor:
    """Return the first layer's input [B, T, H] in float64 for the batch's tokens, without a packed row's padding.

    zeroed: whether to set the first embedding of every example to zero.
    """
    seen: list[torch.Tensor] = []

    def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).double())

    inner = unwrapped(model)
    handle = decoder_layers(inner)[0].register_forward_pre_hook(look, with_kwargs=True)
    try:
        if zeroed:
            inputs = model_inputs(inner, batch)
            embedded = inner.get_input_embeddings()(inputs["input_ids"]).clone()
            embedded[_first_places(batch)] = 0
            with packed_forward() if batch.documents else nullcontext():
                decoder_of(inner)(**inputs | {"input_ids": None, "inputs_embeds": embedded})
        else:
            hidden_states(inner, batch)
        return seen[0][:, : batch.input_ids.shape[1]]
    finally:
        handle.remove()


def _first_places(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and columns of the first real token of each example, independently of `sequence_starts`."""
    mask, device = batch.attention_mask, batch.input_ids.device
    if batch.documents:
        columns = numbers_on(device, [0, *itertools.accumulate(batch.documents[:-1])])
        return torch.zeros_like(columns), columns
    rows = torch.arange(len(batch.input_ids), device=device)
    return rows, torch.zeros_like(rows) if mask is None else mask.long().argmax(dim=-1)
