"""LLaMA-Factory's template names, and which of surefoot's templates lays a conversation out in the same way.

What stands before an answer is the same, token for token, for every name in `SAME`. Behind it LLaMA-Factory counts the
line break of a turn among what the model learns, where the row says so; surefoot lets the program write it.
Facts: research into src/llamafactory/data/template.py, and its list of names.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.families.templates import NAMES as OURS
from surefoot.nearest import nearest_words

_BREAK = "the line break behind an answer carries no loss"


@dataclass(frozen=True)
class Same:
    """ours: the template. bos: whether it begins with BOS. system: what it says where nobody gives a system text.
    differs: in what it is not quite the same; empty where it is."""

    ours: str
    bos: bool
    system: str = ""
    differs: str = ""


_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

SAME = {
    "llama3": Same("llama3", bos=True),
    "mistral": Same("mistral", bos=True),
    "phi": Same("phi3", bos=False, differs=f"{_BREAK}, and EOS stands behind the last one"),
    "qwen": Same("qwen", bos=False, system=_QWEN, differs=_BREAK),
    "qwen3": Same("qwen3", bos=False, differs=_BREAK),
    "qwen3_nothink": Same("chatml", bos=False, differs=_BREAK),
    "chatml": Same("chatml", bos=False, differs=_BREAK),
    "yi": Same("chatml", bos=False, differs=_BREAK),
    "smollm": Same("chatml", bos=False, differs=_BREAK),
    "gemma": Same("gemma", bos=True, differs=_BREAK),
    "gemma3": Same("gemma", bos=True, differs=_BREAK),
}

_UNLIKE = {  # surefoot has a template of this name, which is laid out otherwise
    "alpaca": "LLaMA-Factory puts an input behind the instruction and breaks the line twice behind an answer",
    "llama2": "LLaMA-Factory puts no blank around an answer",
    "vicuna": "LLaMA-Factory puts no blank before USER and the answer",
    "zephyr": "LLaMA-Factory breaks no line behind EOS and begins with a system text of its own",
}

_WITHOUT = (
    "aeva bailing bailing_v2 breeze chatglm3 chatml_de cohere cpm4 dbrx deepseek deepseek3 deepseekr1 hy3 "
    "deepseekcoder default dots_ocr empty ernie ernie_nothink ernie_vl exaone falcon falcon_h1 fewshot gemma2 "
    "gemma3n gemma4 gemma4n glm4 glm4_moe glm4v glm4_5v glm_ocr glm4_7 glmz1 gpt_oss granite3 granite3_vision "
    "granite4 index hunyuan hunyuan_small hy_dense_1_8b hy_dense_7b intern2 intern_vl intern_s1 keye_vl kimi_vl "
    "lfm2 lfm2_vl llama2_zh llama4 mllama moonlight moss_vl llava llava_next llava_next_llama3 llava_next_mistral "
    "llava_next_qwen llava_next_yi llava_next_video llava_next_video_mistral llava_next_video_yi mimo mimo_v2 "
    "mimo_vl minicpm_v minicpm_v_4_6 minicpm_o minimax1 minimax2 ministral mistral_small ministral3 olmo openchat "
    "openchat-3.6 opencoder paligemma paligemma_chat phi_small phi4 phi4_mini pixtral qwen2_audio qwen2_omni "
    "qwen3_omni qwen3_omni_nothink qwen2_vl qwen3_vl qwen3_vl_nothink qwen3_5 qwen3_5_nothink qwen3_6 sailor "
    "seed_coder seed_oss smollm2 solar starchat telechat2 video_llava xuanyuan yi_vl youtu youtu_vl yuan"
)
OTHERS = tuple(_WITHOUT.split())
NAMES = (*SAME, *_UNLIKE, *OTHERS)


def why_not(name: str) -> tuple[str, str]:
    """Of a template without a counterpart: what is wrong with it, and what to do."""
    if name in _UNLIKE:
        fix = f"template: null takes the tokenizer's own; or translate, and set data.template: {name} for surefoot's"
        return f"{name} is laid out otherwise here: {_UNLIKE[name]}", fix
    if name in OTHERS:
        near = nearest_words(name, SAME, 2)
        also = f", or {' or '.join(near)} if that is the model's" if near else ""
        return f"surefoot has no template {name}", f"template: null takes the tokenizer's own{also}"
    near = nearest_words(name, NAMES, 2)
    known = f"did you mean {' or '.join(near)}?" if near else f"surefoot reads {', '.join(SAME)}"
    return f"LLaMA-Factory has no template {name}", known


assert all(row.ours in OURS for row in SAME.values())
