"""The named templates, one row each: the text around the contents of a conversation.

`surefoot.data.chat.builtin_template` renders conversations with a row, `surefoot.data.chat.builtin_jinja` converts it
to a Jinja chat template for other programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from surefoot.families.other_templates import AXOLOTL, LLAMAFACTORY
from surefoot.families.template_row import LLAMA31, MISTRAL, TASK, TASK_WITH_INPUT, Dialogue, Prompt, Row, in_turn
from surefoot.system.errors import Fault
from surefoot.system.locations import TEMPLATE_SUFFIX
from surefoot.system.messages import nearest_word

OWN = "tokenizer"  # the tokenizer's chat template
OWN_OR = f"{OWN}-or-"  # followed by the name of the template to use if the tokenizer has none
IN_CONFIG = f"data.template{TEMPLATE_SUFFIX}"  # name of a template whose Jinja is in the config
BY_RECORD = "by-record"  # of data.template and data.train_on: decided by the first record of the data


_INDENT = " " * 16  # the published code has indented multi-line strings, so its prompts are indented


def _commonsense(name: str, about: str, header_blanks: str, blank_line: str) -> Prompt:
    """Make the training and evaluation prompts of LLM-Adapters, byte for byte; they differ in whitespace."""
    return Prompt(
        name=name,
        about=about,
        header=TASK + " " + header_blanks,
        header_input=TASK_WITH_INPUT + header_blanks,
        instruction=f"\n\n{_INDENT}### Instruction:\n{_INDENT}{{content}}\n{blank_line}",
        input=f"\n{_INDENT}### Input:\n{_INDENT}{{content}}\n{blank_line}",
        response=f"\n{_INDENT}### Response:\n{_INDENT}",
    )


def _chatml(name: str, about: str, default_system: str = "", lead: str = "", own_lead: str = "") -> Dialogue:
    return Dialogue(
        name=name,
        about=about,
        system="<|im_start|>system\n{content}<|im_end|>\n",
        user="<|im_start|>user\n{content}<|im_end|>\n",
        opening="<|im_start|>assistant\n",
        lead=lead,
        own_lead=own_lead,
        close="<|im_end|>",
        after="\n",
        default_system=default_system,
        control=("<|im_start|>", "<|im_end|>"),
        stops=("<|im_end|>",),
    )


ROWS: tuple[Row, ...] = (
    Dialogue(
        name="llama3",
        about="Llama 3's headers, tools as in Llama 3.1",
        system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>",
        opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
        close="<|eot_id|>",
        trimmed=("system", "user", "assistant"),
        control=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        stops=("<|eot_id|>",),
        tools=LLAMA31,
    ),
    Dialogue(
        name="llama2",
        about="Llama 2 chat: [INST] blocks, the system text in the first",
        system="<<SYS>>\n{content}\n<</SYS>>\n\n",
        merged=True,
        prefix="{bos}",
        user="[INST] {content} [/INST]",
        between="{bos}",
        opening="",
        lead=" ",
        close=" {eos}",
        trimmed=("user", "assistant"),
    ),
    Dialogue(
        name="phi3",
        about="Phi-3: a token for each role, one that ends a turn",
        system="<|system|>\n{content}<|end|>\n",
        user="<|user|>\n{content}<|end|>\n",
        opening="<|assistant|>\n",
        close="<|end|>",
        after="\n",
        finish="{eos}",
        control=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        stops=("<|end|>",),
    ),
    _chatml(
        "qwen",
        "ChatML with Qwen2.5's system text",
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ),
    _chatml("qwen3", "ChatML with Qwen3's empty thinking block", lead="<think>\n\n</think>\n\n", own_lead="</think>"),
    Dialogue(
        name="mistral",
        about="Mistral 7B v0.3's [INST] blocks, the system text in the first",
        system="{content}\n\n",
        merged=True,
        prefix="{bos}",
        user="[INST] {content}[/INST]",
        opening="",
        lead=" ",
        close="{eos}",
        trimmed=("assistant",),
        tools=MISTRAL,
    ),
    Dialogue(
        name="gemma",
        about="Gemma 2 and 3: user and model turns, the system text in the first",
        system="{content}\n\n",
        merged=True,
        user="<start_of_turn>user\n{content}<end_of_turn>\n",
        opening="<start_of_turn>model\n",
        close="<end_of_turn>",
        after="\n",
        trimmed=("user", "assistant"),
        control=("<start_of_turn>", "<end_of_turn>"),
        stops=("<end_of_turn>",),
    ),
    # DeepSeek's own template for V3 removes reasoning, and R1's prompts end with <think>, which answers lack. The role
    # tokens are not special in its tokenizers, so none is required.
    Dialogue(
        name="deepseek",
        about="DeepSeek V3 and R1: a token for each role, thoughts as the data have them",
        system="{content}",
        user="<｜User｜>{content}",
        opening="<｜Assistant｜>",
        close="{eos}",
    ),
    _chatml("chatml", "ChatML: a token and the role, the text, a token that ends the turn"),
    Prompt(
        name="alpaca",
        about="the headings of Stanford Alpaca: one prompt, one answer, no special tokens",
        header=TASK,
        header_input=TASK_WITH_INPUT,
        instruction="\n\n### Instruction:\n{content}",
        input="\n\n### Input:\n{content}",
        response="\n\n### Response:\n",
        system_as_header=True,
    ),
    Dialogue(
        name="vicuna",
        about="USER: … ASSISTANT: …, for dialogues without special tokens",
        system="{content} ",
        default_system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
        user="USER: {content} ",
        opening="ASSISTANT:",
        lead=" ",
        close="{eos}",
        trimmed=("assistant",),
    ),
    Dialogue(
        name="human-assistant",
        about="Human: … Assistant: …, blank lines between, as hh-rlhf's and DeepSpeed-Chat's texts",
        system="{content}",
        user="\n\nHuman: {content}",
        opening="\n\nAssistant:",
        lead=" ",
        close="{eos}",
        trimmed=("assistant",),
        tools=None,
    ),
    Dialogue(
        name="zephyr",
        about="Zephyr: a line for each role, written as plain text",
        system="<|system|>\n{content}{eos}\n",
        user="<|user|>\n{content}{eos}\n",
        opening="<|assistant|>\n",
        close="{eos}",
        after="\n",
    ),
    Dialogue(
        name="plain",
        about="the texts and nothing else",
        system="{content}\n",
        user="{content}\n",
        opening="",
        close="{eos}",
        tools=None,
        takes_text=True,
    ),
    Dialogue(
        name="raw",
        about="the texts one after another, nothing between them, and EOS",
        system="{content}",
        user="{content}",
        opening="",
        close="{eos}",
        tools=None,
        takes_text=True,
    ),
    _commonsense("commonsense", "LLM-Adapters' training prompts, byte for byte", " ", _INDENT),
    _commonsense("commonsense-eval", "LLM-Adapters' evaluation prompts, byte for byte", "", ""),
    Prompt(
        name="commonsense-sentence",
        about="instruction, input and answer as sentences of one line",
        header="",
        header_input="",
        instruction="{content}.",
        input=" {content}.",
        response="",
        lead=" ",
    ),
)

_BY_NAME = {row.name: row for row in ROWS}
# torchtune's tokenizers of Qwen end a conversation with the token, and its alpaca_dataset is Alpaca's text in a turn.
TORCHTUNE: tuple[Row, ...] = (
    replace(_chatml("torchtune-chatml", "torchtune's ChatML: nothing behind the last answer"), after="", between="\n"),
    *(
        in_turn(f"torchtune-alpaca-{name}", f"torchtune's alpaca_dataset in turns of {name}", alpaca, turns)
        for name in ("llama3", "llama2", "mistral", "phi3", "chatml")
        if isinstance(alpaca := _BY_NAME["alpaca"], Prompt) and isinstance(turns := _BY_NAME[name], Dialogue)
    ),
)
_OF_TOOLS = (*LLAMAFACTORY, *AXOLOTL, *TORCHTUNE)
NAMES: tuple[str, ...] = (OWN, *(row.name for row in ROWS))
ANYWHERE = "alpaca, vicuna or plain"  # rows that need only EOS


def find_row(name: str) -> Row | None:
    """Return the row `name`; None for the tokenizer's own template, a file, or an unknown name."""
    return next((row for row in (*ROWS, *_OF_TOOLS) if row.name == name), None)


def row_like(source: str) -> str:
    """Return the name of a row whose text before questions and answers occurs in this Jinja source, or ""."""
    for row in ROWS:
        if isinstance(row, Dialogue):
            words = (row.user.partition("{content}")[0].strip(), row.opening.strip())
            if all(words) and all(word in source for word in words):
                return row.name
    return ""


def named_row(name: str, is_control: Callable[[str], bool]) -> Row | Fault:
    """Return the row `name`, or why it cannot be used: unknown, or the tokenizer lacks tokens that it needs.

    is_control: whether the tokenizer has this text as a special token.
    """
    row = find_row(name)
    if row is None:
        near = nearest_word(name, [*NAMES, *(row.name for row in _OF_TOOLS)])
        known = f"use auto, {', '.join(NAMES)}, or a file that ends in {TEMPLATE_SUFFIX}"
        return Fault(
            "data.template",
            f"unknown template {name!r}",
            f"did you mean {near}?" if near else known,
            code="SF-DATA-TEMPLATE",
        )
    if missing := [token for token in row.control if not is_control(token)]:
        what = f"{name} needs tokens that this tokenizer lacks: {', '.join(missing)}"
        fix = f"add them with tokenizer.add_special, or use data.template: {ANYWHERE}"
        return Fault("data.template", what, fix, code="SF-DATA-TEMPLATE")
    return row


def is_users_own(name: str) -> bool:
    """Whether data.template is the user's own: a file, or Jinja in the config."""
    return name.endswith(TEMPLATE_SUFFIX) or is_jinja(name)


def is_jinja(name: str) -> bool:
    """Whether data.template is itself a chat template in Jinja."""
    return "{{" in name or "{%" in name
