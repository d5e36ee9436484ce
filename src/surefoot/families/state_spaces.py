"""Families with state spaces instead of attention, or in addition to it: Mamba and models built on it."""

from __future__ import annotations

from surefoot.families.chatml import IM_END
from surefoot.families.family import Family

# The fused kernels of mamba-ssm take these weights themselves and never call the layers; that of the first Mamba also
# takes two more, of which no forward pass calls `dt_proj`.
_PAST_THE_MODULE = ("out_proj", "conv1d")

MAMBA = Family(
    name="mamba",
    model_types=("mamba", "mamba2", "falcon_mamba"),
    uses_bos=None,
    without_adapter=(*_PAST_THE_MODULE, "x_proj", "dt_proj"),
)
# Attention or the first Mamba in a layer, whose forward multiplies with the weight of `dt_proj` itself.
JAMBA = Family(
    name="jamba",
    model_types=("jamba",),
    uses_bos=None,
    without_adapter=("dt_proj",),
)
# Attention and Mamba 2 side by side in every layer. ChatML, behind BOS (Axolotl: falcon_h1.jinja).
FALCON_H1 = Family(
    name="falcon_h1",
    model_types=("falcon_h1",),
    uses_bos=None,
    forbidden_pads=IM_END,
    turn_ends=("<|im_end|>",),
    without_adapter=_PAST_THE_MODULE,
)
# Mamba 2, attention and MLPs, one of them in each layer. ChatML (TRL: nemotron_3_nano.jinja).
NEMOTRON_H = Family(
    name="nemotron_h",
    model_types=("nemotron_h",),
    uses_bos=None,
    forbidden_pads=IM_END,
    turn_ends=("<|im_end|>",),
    without_adapter=_PAST_THE_MODULE,
)
