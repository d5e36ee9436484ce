"""LLaMA-Factory's template names, and the rows that give its token ids and label masks.

Facts: that tool's src/llamafactory/data/template.py and its list of names; `tests/equality` holds ids and masks against
what it makes itself.
"""

from __future__ import annotations

from surefoot.families.other_templates import LLAMAFACTORY, PREFIX
from surefoot.system.messages import nearest_words

UNTHINKING = "qwen3-unthinking"  # qwen3 with enable_thinking: false
_ROWS = {row.name.removeprefix(PREFIX): row for row in LLAMAFACTORY}
_LIKE = {"gemma3": "gemma", "yi": "chatml", "smollm": "chatml"}  # names for the same words
SAME = {
    **{name: row for name, row in _ROWS.items() if name != UNTHINKING},
    **{name: _ROWS[other] for name, other in _LIKE.items()},
}

_WITHOUT = (
    "aeva bailing bailing_v2 breeze chatglm3 chatml_de cohere cpm4 dbrx deepseek deepseek3 deepseekr1 hy3 "
    "deepseekcoder dots_ocr empty ernie ernie_nothink ernie_vl exaone falcon falcon_h1 fewshot gemma2 "
    "gemma3n gemma4 gemma4n glm4 glm4_moe glm4v glm4_5v glm_ocr glm4_7 glmz1 gpt_oss granite3 granite3_vision "
    "granite4 index hunyuan hunyuan_small hy_dense_1_8b hy_dense_7b intern2 intern_vl intern_s1 keye_vl kimi_vl "
    "lfm2 lfm2_vl llama2_zh llama4 mllama moonlight moss_vl llava llava_next llava_next_llama3 llava_next_mistral "
    "llava_next_qwen llava_next_yi llava_next_video llava_next_video_mistral llava_next_video_yi mimo mimo_v2 "
    "mimo_vl minicpm_v minicpm_v_4_6 minicpm_o minimax1 minimax2 ministral mistral_small ministral3 olmo openchat "
    "openchat-3.6 opencoder paligemma paligemma_chat phi_small phi4_mini pixtral qwen2_audio qwen2_omni "
    "qwen3_omni qwen3_omni_nothink qwen2_vl qwen3_vl qwen3_vl_nothink qwen3_5 qwen3_5_nothink qwen3_6 sailor "
    "seed_coder seed_oss smollm2 solar starchat telechat2 video_llava xuanyuan yi_vl youtu youtu_vl yuan"
)
OTHERS = tuple(_WITHOUT.split())
NAMES = (*SAME, *OTHERS)


def writes_bos(name: str) -> bool:
    """Whether the template begins with BOS."""
    row = SAME[name]
    return "{bos}" in row.prefix + row.user


def why_not(name: str) -> tuple[str, str]:
    """Of a template without a counterpart: what is wrong with it, and what to do."""
    if name in OTHERS:
        near = nearest_words(name, SAME, 2)
        also = f", or {' or '.join(near)} if that is the model's" if near else ""
        return f"surefoot has no template {name}", f"template: null takes the tokenizer's own{also}"
    near = nearest_words(name, NAMES, 2)
    known = f"did you mean {' or '.join(near)}?" if near else f"surefoot reads {', '.join(SAME)}"
    return f"LLaMA-Factory has no template {name}", known
