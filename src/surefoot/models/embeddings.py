"""Embedding and output head: weight tying, added rows, and NEFTune noise.

The row of a new PAD is the mean of the existing ones (Hewitt 2021, "Initializing new word embeddings for pretrained
language models"). With a random or zero row the new token could take probability from all others at step 0; with the
mean its logit is the mean logit. The mean is computed in float64, so that it depends on device and thread count at most
in the last bit of fp32. Rows of tokens that will be learned are drawn closely around the mean, as transformers does: a
normal distribution with 1e-9 times the covariance of the existing rows, where that has full rank.

NEFTune (Jain et al. 2023, arXiv 2310.05914) adds noise to the embeddings during training:

    e' = e + alpha / sqrt(L d) * u,   u uniform in [-1, 1], drawn per element

L is the sequence length, here the number of real tokens of the example, and d the embedding size. transformers' Trainer
and TRL use the padded length for L, so the same example gets less noise in a batch with a longer one. Noise on padding
has no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from surefoot.data.batching.batch import numbers_on
from surefoot.models.forward import causal_model
from surefoot.models.quiet import quiet_libraries
from surefoot.models.wrapped import says_tied
from surefoot.system.errors import Fault, InputError


def embedding_and_head(model: PreTrainedModel) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the two weights, each [vocabulary, hidden]; the same parameter if they are tied."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has an output head"
    return model.get_input_embeddings().get_parameter("weight"), head.get_parameter("weight")


def is_tied(model: PreTrainedModel) -> bool:
    """Whether embedding and output head are the same parameter."""
    embedding, head = embedding_and_head(model)
    return embedding is head


def check_tied(model: PreTrainedModel, where: str) -> None:
    """Raises InputError if the config ties head and embedding but the files contain two different matrices."""
    if says_tied(model.config) and not is_tied(model):
        what = "config.json ties the output head to the embedding, but the files contain two different matrices"
        raise InputError(Fault(where, what, "set tie_word_embeddings to false in config.json", code="SF-MODEL-KEYS"))


def resize_vocabulary(model: PreTrainedModel, rows: int, *, drawn: int = 0, seed: int = 0) -> None:
    """Add embedding and head rows until the head has `rows`; keeps tying. Raises ValueError if it has more already.

    drawn: rows from here on are the mean of those before, and new ones up to here are drawn around it.
    seed: of that draw.
    """
    embedding, head = embedding_and_head(model)
    before = head.shape[0]
    if rows < before:
        raise ValueError(f"the head has {before} rows; {rows} would drop some")
    if rows == before:
        return
    tied = is_tied(model)
    generators = [embedding.device] if embedding.device.type == "cuda" else []
    with quiet_libraries(), torch.random.fork_rng(devices=generators):
        if before < drawn:
            torch.manual_seed(seed)
            model.resize_token_embeddings(drawn, mean_resizing=True)
            before = drawn
        model.resize_token_embeddings(rows, mean_resizing=False)  # which initializes the rows at random
    with torch.no_grad():
        for weight in embedding_and_head(model) if before < rows else ():
            weight[before:] = weight[:before].mean(dim=0, dtype=torch.float64).to(weight.dtype)
    if is_tied(model) != tied:
        raise RuntimeError("resizing the vocabulary changed whether the head is tied to the embedding")


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float, lengths: Sequence[int]) -> Iterator[None]:
    """Context in which NEFTune noise is added to the output of the input embeddings in training mode. The noise comes
    from torch's generator of the embeddings' device.

    lengths: real tokens of each row of the batch, or of each document of a packed row.
    """

    def add(module: nn.Module, inputs: object, embedded: torch.Tensor) -> torch.Tensor:
        # A reference under the policy's adapter runs in evaluation mode.
        return embedded + embedding_noise(embedded, alpha, lengths) if module.training else embedded

    hook = causal_model(model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def embedding_noise(embedded: torch.Tensor, alpha: float, lengths: Sequence[int]) -> torch.Tensor:
    """Return noise [B, T, d] in the dtype of `embedded`; drawn in fp32, as 16 bits have few values in [-1, 1]."""
    draw = torch.empty_like(embedded, dtype=torch.float32).uniform_(-1, 1)
    real = numbers_on(embedded.device, lengths, torch.float32)
    size = alpha / torch.sqrt(real * embedded.shape[-1])  # [B], or of each document
    if len(lengths) == len(embedded):
        return (draw * size[:, None, None]).to(embedded.dtype)
    by_token = size.repeat_interleave(real.long(), output_size=sum(lengths))  # no sync on a GPU
    by_token = F.pad(by_token, (0, embedded.shape[1] - sum(lengths)))  # padding at the end of a packed row
    return (draw * by_token[None, :, None]).to(embedded.dtype)
