"""Templates of LLaMA-Factory and Axolotl, so that their configs train on the same token ids under the same label mask.

LLaMA-Factory's differ from the rows of the same name in `surefoot.families.templates`, which follow the models'
publishers: every slot is tokenized separately, the text after the end of an answer is learned too, and some have no
BOS. Source: LLaMA-Factory 0.9.5; its token ids are in `tests/equality`. Not supported: templates with labels that
differ from the tokens (gemma2, falcon, solar: `efficient_eos`) or without ends of answers (empty), and tools.

Axolotl's: chat_template alpaca and phi_3 of version 0.18; its chatml, llama3 and gemma equal surefoot's.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.families.template_row import ALONE, TASK, TASK_WITH_INPUT, Dialogue, Prompt, PromptByInput

PREFIX = "llamafactory-"
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_NO_THOUGHT = "<think>\n\n</think>\n\n"


def _row(
    name: str,
    user: str,
    *,
    answer: str = "{content}{eos}",
    system: str = "{content}",
    default_system: str = "",
    begins: str = "",
    merged: bool = False,
    control: tuple[str, ...] = (),
    stops: tuple[str, ...] = (),
    thought: str = "",
    thought_learned: bool = True,
) -> Dialogue:
    """Make a row.

    user: text around the user's, including what opens the answer.
    answer: {content} and what ends it.
    begins: {bos} or nothing.
    """
    lead, close = answer.split("{content}")
    return Dialogue(
        name=PREFIX + name,
        about=f"LLaMA-Factory's {name}, token for token",
        user=("" if merged else ALONE) + user,
        system=(ALONE if not merged else "") + system,
        merged=merged,
        default_system=default_system,
        prefix=begins + ALONE,
        opening="" if thought_learned else ALONE + thought,
        lead=ALONE + (thought + ALONE if thought and thought_learned else "") + lead,
        own_lead="</think>" if thought else "",
        close=close.replace("{eos}", "{eos}" + ALONE),
        control=control,
        stops=stops,
        tools=None,
    )


def _chatml(name: str, default_system: str = "", **more: object) -> Dialogue:
    return _row(
        name,
        "<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n",
        answer="{content}<|im_end|>\n",
        system="<|im_start|>system\n{content}<|im_end|>\n",
        default_system=default_system,
        control=("<|im_start|>", "<|im_end|>"),
        stops=("<|im_end|>",),
        **more,  # pyright: ignore[reportArgumentType]
    )


LLAMAFACTORY: tuple[Dialogue, ...] = (
    _row(
        "alpaca",
        "### Instruction:\n{content}\n\n### Response:\n",
        answer="{content}{eos}\n\n",
        default_system=f"{TASK}\n\n",
    ),
    _chatml("chatml"),
    _row(
        "default",
        "Human: {content}{eos}{alone}\nAssistant:",
        answer="{content}{eos}\n",
        system="System: {content}{eos}{alone}\n",
    ),
    _row("deepseek", "User: {content}\n\nAssistant:", system="{content}\n\n", begins="{bos}"),
    _row("deepseek3", "<｜User｜>{content}<｜Assistant｜>", begins="{bos}"),  # not special in DeepSeek's tokenizers
    _row(
        "gemma",
        "<start_of_turn>user\n{content}<end_of_turn>\n<start_of_turn>model\n",
        answer="{content}<end_of_turn>\n",
        system="{content}\n\n",
        begins="{bos}",
        merged=True,
        control=("<start_of_turn>", "<end_of_turn>"),
        stops=("<end_of_turn>",),
    ),
    _row(
        "llama2",
        "{bos}{alone}[INST] {content} [/INST]",
        system="<<SYS>>\n{content}\n<</SYS>>\n\n",
        merged=True,
    ),
    _row(
        "llama3",
        "<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        answer="{content}<|eot_id|>",
        system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
        begins="{bos}",
        control=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        stops=("<|eot_id|>",),
    ),
    _row(
        "mistral",
        "[INST] {content}[/INST]",
        answer=" {content}{eos}",
        system="{content}\n\n",
        begins="{bos}",
        merged=True,
    ),
    _row(
        "phi",
        # LLaMA-Factory makes <|end|> EOS, so that it no longer strips the newline after it.
        "<|user|>\n{content}<|end|>{alone}\n<|assistant|>\n",
        answer="{content}<|end|>{alone}\n",
        system="<|system|>\n{content}<|end|>{alone}\n",
        control=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        stops=("<|end|>",),
    ),
    _row(
        "phi4",
        "<|im_start|>user<|im_sep|>{content}<|im_end|><|im_start|>assistant<|im_sep|>",
        answer="{content}<|im_end|>",
        system="<|im_start|>system<|im_sep|>{content}<|im_end|>",
        control=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        stops=("<|im_end|>",),
    ),
    _chatml("qwen", _QWEN),
    _chatml("qwen2_vl", "You are a helpful assistant."),
    _chatml("qwen3", thought=_NO_THOUGHT),
    _chatml("qwen3-unthinking", thought=_NO_THOUGHT, thought_learned=False),
    _chatml("qwen3_nothink"),
    _row("vicuna", "USER: {content} ASSISTANT:", default_system=_VICUNA),
    _row(
        "zephyr",
        "<|user|>\n{content}{eos}{alone}<|assistant|>\n",
        system="<|system|>\n{content}{eos}",
        default_system="You are Zephyr, a helpful assistant.",
    ),
)


_INSTRUCT = Prompt(
    name="axolotl-alpaca-instruct",
    about="Axolotl's data set type alpaca: Alpaca's prompt; the answer is tokenized as a text of its own",
    header=TASK,
    header_input=TASK_WITH_INPUT,
    instruction="\n\n### Instruction:\n{content}",
    input="\n\n### Input:\n{content}",
    response="\n\n### Response:\n",
    lead=ALONE,
)

AXOLOTL: tuple[Dialogue | Prompt, ...] = (
    _INSTRUCT,
    Prompt(
        name="axolotl-alpaca-chat",
        about="Axolotl's data set type alpaca:chat: Alpaca's sentence, and USER and ASSISTANT in place of its headings",
        header=f"SYSTEM: {TASK}\n",
        header_input=f"SYSTEM: {TASK_WITH_INPUT}\n",
        instruction="USER: {content}\n",
        input="{content}\n",
        response="ASSISTANT:",
        lead=ALONE,
    ),
    Prompt(
        name="axolotl-alpaca-chatml",
        about="Axolotl's data set type alpaca:chatml: Alpaca's sentence, and ChatML's turns in place of its headings",
        header=f"<|im_start|>system\n{TASK}<|im_end|>\n",
        header_input=f"<|im_start|>system\n{TASK_WITH_INPUT}<|im_end|>\n",
        instruction="<|im_start|>user\n{content}",
        input="\n{content}",
        response="<|im_end|>\n<|im_start|>assistant\n",
        lead=ALONE,
        control=("<|im_start|>", "<|im_end|>"),
    ),
    PromptByInput(
        name="axolotl-alpaca-phi",
        about="Axolotl's data set type alpaca:phi: Alpaca's sentence, and Phi-3's turns; an input follows the user's",
        header=f"<|system|>\n{TASK}<|end|>\n",
        header_input=f"<|system|>\n{TASK_WITH_INPUT}<|end|>\n",
        instruction="<|user|>\n{content}<|end|>",
        input="{content}",
        response="\n<|assistant|>\n",
        heading="<|assistant|>",
        lead=ALONE,
        control=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    replace(
        _INSTRUCT,
        name="axolotl-jeopardy",
        about="Axolotl's data set type jeopardy: Alpaca's prompt, and answers that begin with `what is`",
        lead=f"{ALONE}what is ",
    ),
    Dialogue(
        name="axolotl-alpaca",
        about="Axolotl's chat template alpaca: its headings around every turn, and no sentence before them",
        system="{content}\n\n",
        user="### Instruction:\n{content}\n\n",
        between="\n\n",
        opening="### Response:\n",
        close="{eos}",
        tools=None,
    ),
    Dialogue(
        name="axolotl-phi_3",
        about="Axolotl's chat template phi_3: Phi-3's without EOS behind the last turn",
        system="<|system|>\n{content}<|end|>\n",
        user="<|user|>\n{content}<|end|>\n",
        opening="<|assistant|>\n",
        close="<|end|>",
        after="\n",
        control=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        stops=("<|end|>",),
        tools=None,
    ),
)
