"""What an adapter is: of the policy, and of a critic that has one of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from surefoot.config.types import Count, Flag, Positive, Section, Share, Text


class AdapterShape(Section):
    kind: Annotated[Literal["lora", "dora"], Field(examples=["lora"])]
    """lora: W + scale * B A.  dora: the same, with the norm of each row of W learned separately."""
    rank: Count = 16
    """Rank of A and B."""
    alpha: Positive = 32.0
    """Scale is alpha / rank (alpha / sqrt(rank) with rslora)."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear"
    """all-linear (every linear layer but the output head), or module names such as [q_proj, v_proj]; with a dot at its
    end, as [decoder.layers.], a name takes every linear layer that lies there."""
    rslora: Flag = False
    """Rank-stabilised scale: alpha / sqrt(rank)."""
    modules_to_save: list[Text] = Field(default=[], examples=[["lm_head"]])
    """Modules trained in full and saved with the adapter, such as [lm_head]."""
