"""All knowledge that depends on a model's name, one row per family. A new family is a new row."""

from __future__ import annotations

from surefoot.families.chatml import LFM2, QWEN2_MOE, QWEN3_5, QWEN3_MOE, QWEN3_NEXT, QWEN_VL, SMOLLM3
from surefoot.families.family import Family
from surefoot.families.gpt_like import GPT2, OPT
from surefoot.families.llama_like import GEMMA2, GEMMA3, LLAMA, MISTRAL, MLLAMA, PHI3, QWEN2, QWEN3
from surefoot.families.own_turns import (
    COHERE,
    DEEPSEEK,
    ERNIE,
    EXAONE4,
    GEMMA,
    GEMMA3N,
    GEMMA4,
    GLM,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    HUNYUAN,
    LLAMA4,
    MINISTRAL,
    MIXTRAL,
    NEMOTRON,
    OLMO,
    PADDLEOCR,
    SEED_OSS,
)
from surefoot.families.state_spaces import FALCON_H1, JAMBA, MAMBA, NEMOTRON_H

FAMILIES: tuple[Family, ...] = (
    *(LLAMA, MLLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, OPT, GPT2),
    *(QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT, QWEN3_5, QWEN_VL, LFM2, SMOLLM3),
    *(GEMMA, GEMMA3N, GEMMA4, MIXTRAL, MINISTRAL, LLAMA4, GPT_OSS, GLM, DEEPSEEK, OLMO, GRANITE, COHERE, EXAONE4),
    *(SEED_OSS, ERNIE, PADDLEOCR, HUNYUAN, NEMOTRON, GPT_NEOX),
    *(MAMBA, JAMBA, FALCON_H1, NEMOTRON_H),
)


def find(model_type: str) -> Family | None:
    """Return the family of a config.json's `model_type`; None if there is no row for it."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def counterpart(name: str, family: Family) -> str | None:
    """Return the linear layer of `family` with the same role as `name` in another family; None if unknown.

    Names are last components of module names: q_proj -> c_attn for GPT-2, whose q, k and v are one matrix.
    """
    roles = {
        role
        for other in FAMILIES
        if other.structure
        for linear in other.structure.linears
        if linear.path.rpartition(".")[2] == name
        for role in linear.roles
    }
    own = family.structure.linears if family.structure else ()
    return next((linear.path.rpartition(".")[2] for linear in own if roles & set(linear.roles)), None)
