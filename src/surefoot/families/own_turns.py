"""Families with turn tokens of their own, whose structure is read from the model.

Comments name the source of each fact; `surefoot.families.chatml` lists the versions.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.families.chatml import ENDS_TURNS
from surefoot.families.family import Family, ForbiddenPad, ReservedPad
from surefoot.families.llama_like import GEMMA2, LLAMA, MISTRAL

# Gemma 2's tokenizer and turns (TRL: gemma.jinja, the same for both), none of its caps.
GEMMA = replace(GEMMA2, name="gemma", model_types=("gemma",), structure=None, window=None, without_sdpa="")
# Gemma's turns (Axolotl: gemma3n.jinja). In training AltUp's forward clamps the weight of `correction_coefs` and
# applies it without calling the layer.
GEMMA3N = replace(
    GEMMA,
    name="gemma3n",
    model_types=("gemma3n_text",),
    without_adapter=("correction_coefs",),
)
# Turns are <|turn>user … <turn|> (LLaMA-Factory: gemma4).
GEMMA4 = Family(
    name="gemma4",
    model_types=("gemma4_text", "gemma4_unified_text"),
    uses_bos=True,
    reserved_pads=(ReservedPad("<pad>", "reserved for padding"),),
    forbidden_pads=(ForbiddenPad("<turn|>", ENDS_TURNS),),
    turn_ends=("<turn|>",),
)

# Mistral's own tokenizers: 8x7B and 8x22B as in v0.1 to v0.3, the later ones tekken (pad_token_id 11, <pad>).
MIXTRAL = replace(MISTRAL, name="mixtral", model_types=("mixtral",), structure=None)
MINISTRAL = replace(MISTRAL, name="ministral", model_types=("ministral", "ministral3"), structure=None, templates=())

# Llama 4: as Llama 3, with shorter names (LLaMA-Factory: llama4).
LLAMA4 = Family(
    name="llama4",
    model_types=("llama4_text",),
    uses_bos=LLAMA.uses_bos,
    reserved_pads=(ReservedPad("<|finetune_right_pad|>", "reserved for padding"),),
    forbidden_pads=(ForbiddenPad("<|eot|>", ENDS_TURNS),),
    turn_ends=("<|eot|>", "<|eom|>"),
)

# Harmony (the format that openai/harmony documents): a message ends with <|end|> and more follow; the model stops at
# <|return|>, its EOS, or at <|call|>. The tokenizer names <|startoftext|>, which no rendering begins with.
GPT_OSS = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    uses_bos=False,
    reserved_pads=(ReservedPad("<|endoftext|>", "separated documents in pretraining; harmony writes it nowhere"),),
    forbidden_pads=(
        ForbiddenPad("<|return|>", ENDS_TURNS),
        ForbiddenPad("<|end|>", "ends every message: whoever masks padding by id would never train it"),
        ForbiddenPad("<|call|>", "ends every call: whoever masks padding by id would never train it"),
    ),
    turn_ends=("<|return|>", "<|call|>"),
)

# [gMASK]<sop> begins every text, written by the template and not named as BOS. An answer has no token that ends it:
# the model stops by writing the one that begins the next turn, and generation_config.json lists these as EOS
# (transformers: Glm4Config, eos_token_id 151329, 151336, 151338; LLaMA-Factory: glm4).
GLM = Family(
    name="glm",
    model_types=("glm", "glm4", "glm4_moe", "glm4v_text", "glm4v_moe_text"),
    uses_bos=False,
    reserved_pads=(ReservedPad("<|endoftext|>", "what GLM pads with; it separated documents in pretraining"),),
    forbidden_pads=tuple(
        ForbiddenPad(token, "ends answers by beginning the next turn: whoever masks padding by id would never train it")
        for token in ("<|user|>", "<|observation|>")
    ),
    turn_ends=("<|user|>", "<|observation|>"),
)

# BOS is written by the chat template and by LLaMA-Factory's; EOS ends every turn (TRL: deepseekv3.jinja).
DEEPSEEK = Family(
    name="deepseek",
    model_types=("deepseek_v2", "deepseek_v3"),
    uses_bos=True,
    reserved_pads=(ReservedPad("<｜▁pad▁｜>", "reserved for padding"),),
    forbidden_pads=(ForbiddenPad("<｜end▁of▁sentence｜>", ENDS_TURNS),),
    turn_ends=("<｜end▁of▁sentence｜>",),
    templates=("deepseek",),
)

# A base model has no BOS (transformers: bos_token_id None); <|endoftext|> begins a chat (LLaMA-Factory: olmo). OLMo 1's
# pad_token_id 1 is <|padding|> of GPT-NeoX's tokenizer, OLMo 3 names its own (TRL: olmo3_for_causal_lm.py).
OLMO = Family(name="olmo", model_types=("olmo", "olmo2", "olmo3", "olmoe"), uses_bos=None)

# GPT-NeoX, Pythia, Dolly 2. <|endoftext|> is BOS and EOS, and the tokenizer puts none in front (transformers:
# GPTNeoXTokenizer, whose pad_token is <|padding|>; the published tokenizer_config.json of Pythia names no PAD).
GPT_NEOX = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    uses_bos=False,
    reserved_pads=(ReservedPad("<|padding|>", "reserved for padding"),),
)

# Turns are <|start_of_role|>user<|end_of_role|> … <|end_of_text|> (LLaMA-Factory: granite3, granite4).
GRANITE = Family(
    name="granite",
    model_types=("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"),
    uses_bos=None,
    turn_ends=("<|end_of_text|>",),
)

# transformers: CohereTokenizer. <BOS_TOKEN> begins every prompt (TRL: cohere2.jinja).
COHERE = Family(
    name="cohere",
    model_types=("cohere", "cohere2"),
    uses_bos=True,
    reserved_pads=(ReservedPad("<PAD>", "reserved for padding"),),
    forbidden_pads=(ForbiddenPad("<|END_OF_TURN_TOKEN|>", ENDS_TURNS),),
    turn_ends=("<|END_OF_TURN_TOKEN|>",),
)

# [|endofturn|] ends every turn (Axolotl: exaone4.jinja).
EXAONE4 = Family(
    name="exaone4",
    model_types=("exaone4",),
    uses_bos=None,
    forbidden_pads=(ForbiddenPad("[|endofturn|]", ENDS_TURNS),),
    turn_ends=("[|endofturn|]",),
)

# <seed:bos> begins every turn, not every text (ByteDance's template, in llama.cpp's models/templates).
SEED_OSS = Family(
    name="seed_oss",
    model_types=("seed_oss",),
    uses_bos=None,
    reserved_pads=(ReservedPad("<seed:pad>", "reserved for padding"),),
    forbidden_pads=(ForbiddenPad("<seed:eos>", ENDS_TURNS),),
    turn_ends=("<seed:eos>",),
)

# LLaMA-Factory: ernie, ernie_nothink.
ERNIE = Family(
    name="ernie4_5",
    model_types=("ernie4_5", "ernie4_5_moe"),
    uses_bos=None,
    turn_ends=("<|end_of_sentence|>", "<|im_end|>"),
)

# Ernie 4.5 inside PaddleOCR-VL, with a tokenizer of its own: the template begins with <|begin_of_sentence|> and ends
# answers with EOS.
PADDLEOCR = Family(
    name="paddleocr_vl",
    model_types=("paddleocr_vl_text",),
    uses_bos=None,
    forbidden_pads=(ForbiddenPad("</s>", ENDS_TURNS),),
    turn_ends=("</s>",),
)

# LLaMA-Factory: hunyuan (7B), hunyuan_small and hy_dense_1_8b; the sizes have two tokenizers.
HUNYUAN = Family(
    name="hunyuan",
    model_types=("hunyuan_v1_dense", "hunyuan_v1_moe"),
    uses_bos=None,
    forbidden_pads=(ForbiddenPad("<|eos|>", ENDS_TURNS), ForbiddenPad("<｜hy_place▁holder▁no▁2｜>", ENDS_TURNS)),
    turn_ends=("<|eos|>", "<｜hy_place▁holder▁no▁2｜>"),
)

# Nothing is known by its name that the files do not say: the row says that it has been tried.
NEMOTRON = Family(name="nemotron", model_types=("nemotron",), uses_bos=None)
