"""Families whose chat models use ChatML and whose structure is read from the model: Qwen's mixtures and hybrids, the
language models of Qwen-VL, LFM2, SmolLM3.

Comments name the source of each fact: chat templates and tiny models of TRL 1.9, the template table of LLaMA-Factory
0.9.5, templates of Axolotl 0.18, defaults of the configuration and tokenizer classes of transformers 5.23.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.families.family import Family, ForbiddenPad, ReservedPad
from surefoot.families.llama_like import QWEN2, QWEN3

ENDS_TURNS = "ends every turn: whoever masks padding by id would never train it"
IM_END = (ForbiddenPad("<|im_end|>", ENDS_TURNS),)

# The tokenizer of Qwen3: no BOS, <|endoftext|> pads (transformers: Qwen2Tokenizer, Qwen3_5Tokenizer).
QWEN3_MOE = replace(QWEN3, name="qwen3_moe", model_types=("qwen3_moe",), structure=None)
QWEN2_MOE = replace(QWEN2, name="qwen2_moe", model_types=("qwen2_moe",), structure=None, templates=("chatml",))
# Gated delta rules in three layers of four. Qwen3-Next writes Hermes' calls in ChatML, and its Instruct models no
# thinking block.
QWEN3_NEXT = replace(QWEN3_MOE, name="qwen3_next", model_types=("qwen3_next",), window=None, templates=("chatml",))
# Calls are XML here (<function=…>, TRL: qwen3_5_think.jinja), which no named template writes.
QWEN3_5 = replace(QWEN3_NEXT, name="qwen3_5", model_types=("qwen3_5_text", "qwen3_5_moe_text"), templates=())
# Inside Qwen-VL's wrappers. ChatML (TRL: qwen2_5_vl.jinja, qwen3_vl.jinja).
QWEN_VL = replace(
    QWEN2_MOE,
    name="qwen_vl",
    model_types=("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
)

# BOS is written by the chat template (TRL: lfm2.jinja), and EOS is <|im_end|>, not the <|endoftext|> of the
# configuration class (TRL: lfm2_for_causal_lm.py). Tools have tokens of their own.
LFM2 = Family(
    name="lfm2",
    model_types=("lfm2", "lfm2_moe"),
    uses_bos=None,
    forbidden_pads=IM_END,
    turn_ends=("<|im_end|>",),
)
# Llama 3's tokenizer: pad_token_id 128004 of the configuration class is its reserved pad.
SMOLLM3 = Family(
    name="smollm3",
    model_types=("smollm3",),
    uses_bos=None,
    reserved_pads=(ReservedPad("<|finetune_right_pad_id|>", "reserved for padding in Llama 3.1's tokenizer"),),
    forbidden_pads=IM_END,
    turn_ends=("<|im_end|>",),
    templates=("chatml",),
)
