"""Conversations to test every chat template with, and tokenizers of every family."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helpers import zoo_templates, zoo_tokenizers
from surefoot.data.chat.render import messages
from surefoot.data.formats import Conversation, ToolCall, Turn
from surefoot.data.tokenize.encode import EncodeSettings, encode
from surefoot.data.tokenize.segments import Template, TextEncoder

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Tells "the weather" – now',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SYSTEM, USER, ANSWER = Turn("system", "You are a heron."), Turn("user", "Where?"), Turn("assistant", "Here it is.")
AGAIN, LAST = Turn("user", " And then?\n"), Turn("assistant", "Nothing – the end.")
CALL = Turn("assistant", "", calls=(ToolCall("weather", {"city": "Bonn", "days": [1, 2.5, None]}),))
RESULT = Turn("tool", '{"sky": "blue"}')
CASES = {
    "single": Conversation((USER, ANSWER), 1, 1),
    "multi-turn": Conversation((USER, ANSWER, AGAIN, LAST), 1, 1),
    "system": Conversation((SYSTEM, USER, ANSWER), 1, 1),
    "tools": Conversation((SYSTEM, USER, CALL, RESULT, ANSWER), 1, 1, tools=(TOOL,)),
}
ZEPHYR = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""  # as published: the line ends behind the braces are written
_MAKERS: dict[str, tuple[Callable[..., None], str | None, dict[str, Any]]] = {
    "llama2": (zoo_tokenizers.llama2, zoo_templates.LLAMA2, {}),
    "llama3": (zoo_tokenizers.llama3, zoo_templates.LLAMA3, {"pad": False}),
    "llama3.1": (zoo_tokenizers.llama3, zoo_templates.LLAMA31, {"pad": True}),
    "mistral": (zoo_tokenizers.mistral, zoo_templates.MISTRAL_V03, {"control": True}),
    "zephyr": (zoo_tokenizers.mistral, ZEPHYR, {"control": False}),
    "qwen": (zoo_tokenizers.qwen, zoo_templates.QWEN25, {"thinks": False}),
    "qwen3": (zoo_tokenizers.qwen, zoo_templates.QWEN3, {"thinks": True}),
    "phi3": (zoo_tokenizers.phi3, zoo_templates.PHI3, {}),
    "gemma": (zoo_tokenizers.gemma, zoo_templates.GEMMA3, {"image": True}),
    "gpt_oss": (zoo_tokenizers.gpt_oss, zoo_templates.GPT_OSS, {}),
    "glm4": (zoo_tokenizers.glm4, zoo_templates.GLM4, {}),
    "deepseek": (zoo_tokenizers.deepseek, zoo_templates.DEEPSEEK, {}),
    "deepseek-r1": (zoo_tokenizers.deepseek, zoo_templates.DEEPSEEK_R1, {}),
    "opt": (zoo_tokenizers.opt, None, {}),
    "gpt2": (zoo_tokenizers.gpt2, None, {}),
}
TOKENIZERS = tuple(_MAKERS)


@functools.cache
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the layout and chat template of a family. Shared: do not change it."""
    make, template, settings = _MAKERS[family]
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), template, **settings)
        return AutoTokenizer.from_pretrained(folder)


def of_transformers(
    family: str, conversation: Conversation, *, prompt: bool = False, source: str | None = None
) -> list[int]:
    """Return the ids that transformers produces with the tokenizer's own template, or with `source`."""
    return tokenizer(family).apply_chat_template(
        messages(conversation.turns),
        tools=list(conversation.tools) or None,
        chat_template=source,
        add_generation_prompt=prompt,
        return_dict=False,
    )


def ids_and_mask(
    template: Template, encoder: TextEncoder, conversation: Conversation, bos_id: int | None
) -> tuple[list[int], list[bool]]:
    """Return the ids and the mask of supervised tokens that a run would train on."""
    how = EncodeSettings(encoder=encoder, bos_id=bos_id, max_length=10_000)
    (example,) = encode([conversation], template, how, "data.json")
    return example.ids.tolist(), example.supervised.tolist()


def learned(encoder: TextEncoder, ids: list[int], mask: list[bool]) -> list[str]:
    """Return the supervised spans as text."""
    stretches: list[list[int]] = []
    for place, (number, supervised) in enumerate(zip(ids, mask, strict=True)):
        if supervised and not (place and mask[place - 1]):
            stretches.append([])
        if supervised:
            stretches[-1].append(number)
    return [str(encoder.tokenizer.decode(stretch)) for stretch in stretches]
