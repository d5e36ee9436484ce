"""Which of our templates writes the prompts of a model family as Qwen's own tools do, told by the model's name.

A template that a tool chooses by the model's name is named here; other models keep the tokenizer's own.
"""

from __future__ import annotations

import re

from surefoot.families.other_templates import PREFIX
from surefoot.families.templates import OWN

UNTHINKING = f"{PREFIX}qwen3-unthinking"  # an empty thought before each answer, which is not learned
_UNLIKE = r"(?!.*(?:thinking|instruct|2507|coder|next|vl|omni|embedding|reranker|guard|asr|tts))"
# The first that fits, without regard to case.
_BY_NAME = (
    (rf"qwen3(?:\.\d+)?-{_UNLIKE}", UNTHINKING),
    (r"qwen3-(?!.*(?:thinking|omni)).*(?:instruct|coder)", f"{PREFIX}qwen3_nothink"),
    (r"qwen(?:2|2\.5)-vl-", f"{PREFIX}qwen2_vl"),
    (r"qwen2\.5-(?!.*(?:math|omni|vl))", f"{PREFIX}qwen"),
    (r"qwen(?:1\.5|2)-(?!.*(?:math|audio|vl))", f"{PREFIX}qwen2_vl"),  # the same text and system message
)


def template_of(model: str) -> str:
    """Return the template for the model at a path or with a hub id."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    return next((template for pattern, template in _BY_NAME if re.match(pattern, name)), OWN)
