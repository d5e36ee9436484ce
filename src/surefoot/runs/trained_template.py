"""The template that trained goes with the model: into the plan, and into every folder that the tokenizer is saved to.

The planner decides before the data is read; only then is known whether its records are texts, questions or dialogues,
and which token ends an answer in the template at hand. So the plan is completed here.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from surefoot.data.prepare import PreparedData
from surefoot.families.templates import is_file
from surefoot.planning.plan import Choice, RunPlan, TokenizerPlan

_TEXTS = "the records are texts without turns"


def with_template(plan: RunPlan, data: PreparedData) -> RunPlan:
    """The plan with the template and the stop tokens that the examples were really written with."""
    tokens = plan.tokenizer
    name, stops = data.template.name, data.template.stop_ids
    if is_file(name):
        tokens = replace(tokens, template=replace(tokens.template, value=name))  # where it lies now
    elif name != tokens.template.value:
        planned = (
            tokens.template.value if is_on_texts(data) else ""
        )  # evaluation may hold dialogues, after a resume too
        tokens = replace(tokens, template=Choice(name, data.template_reason or _TEXTS, "default"), dialogues=planned)
    if stops != tokens.stop.value:
        reason = f"{tokens.stop.reason}, and what the template writes behind an answer"
        tokens = replace(tokens, stop=Choice(stops, reason, tokens.stop.source))
    return replace(plan, tokenizer=tokens)


def carry_template(tokenizer: PreTrainedTokenizerBase, data: PreparedData, tokens: TokenizerPlan) -> None:
    """From here on the tokenizer's chat template is the one that trains: other programs then ask as the run did.

    A run on texts without turns trained no template, and leaves the tokenizer's own alone.
    """
    if is_on_texts(data):
        return
    bos = str(tokenizer.convert_ids_to_tokens(tokens.bos_id)) if tokens.bos.value and tokens.bos_id is not None else ""
    source = data.template.jinja(bos)
    if tokenizer.chat_template is None or tokenizer.get_chat_template() != source:
        tokenizer.chat_template = source


def is_on_texts(data: PreparedData) -> bool:
    """Whether no record of the training data has turns."""
    return data.audit.source.layout == "text"
