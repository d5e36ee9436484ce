"""NEFTune: noise on the embedded tokens while a model trains (Jain et al. 2023, arXiv 2310.05914).

    e' = e + alpha / sqrt(L d) * u,   u uniform in [-1, 1], drawn for every number

L is the paper's length of the sequence, here the number of real tokens of the example, and d the width. transformers'
Trainer, and TRL through it, put the padded length for L, so that the same example gets less noise beside a longer one.
Noise on padding reaches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.models.forward import causal_model


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float, lengths: Sequence[int]) -> Iterator[None]:
    """The model's input embeddings come out with noise inside; nothing of it stays on the model.

    lengths: real tokens of each row of the batch, or of each document of its one row. The draws come from torch's
    generator of the embeddings' device.
    """

    def add(module: nn.Module, inputs: object, embedded: torch.Tensor) -> torch.Tensor:
        return embedded + embedding_noise(embedded, alpha, lengths)

    hook = causal_model(model).get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def embedding_noise(embedded: torch.Tensor, alpha: float, lengths: Sequence[int]) -> torch.Tensor:
    """[B, T, d] in the dtype of `embedded`; drawn in fp32, because 16 bits have few numbers between -1 and 1."""
    draw = torch.empty_like(embedded, dtype=torch.float32).uniform_(-1, 1)
    real = torch.tensor(lengths, dtype=torch.float32, device=embedded.device)
    size = alpha / torch.sqrt(real * embedded.shape[-1])  # [B], or of each document
    if len(lengths) == len(embedded):
        return (draw * size[:, None, None]).to(embedded.dtype)
    by_token = size.repeat_interleave(real.long(), output_size=sum(lengths))  # no sync on a GPU
    by_token = F.pad(by_token, (0, embedded.shape[1] - sum(lengths)))  # behind the documents there is filling
    return (draw * by_token[None, :, None]).to(embedded.dtype)
