"""README.md of an export: what it was made of, how it was checked, and code that runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from surefoot.report.footer import EXAMPLE_PROMPT
from surefoot.system.folders import CERTIFICATE as CERTIFICATE

_WORDS = {
    "adapter_and_merged": "adapter over base, and merged (both in fp32)",
    "scaled_and_baked": "scaled BOS embedding, and written into its row (both in fp32)",
    "reloaded_and_gguf": "these files, and the GGUF file as transformers opens it",
    "fp32_and_reloaded": "fp32, and these files as transformers opens them",
}


@dataclass(frozen=True)
class ExportFacts:
    """base, base_revision: of the model below the adapters, as the user called it. adapters: a line each. record: as in
    export.json. trained: sections of the run's own card, "" where there is none. puts_bos_itself: whoever
    asks the model without a template writes BOS, for the tokenizer does not and the model was trained with it."""

    name: str
    base: str
    base_is_hub_id: bool
    base_revision: str | None
    adapters: tuple[str, ...]
    record: Mapping[str, Any]
    has_template: bool
    modelfile: bool
    trained: str
    puts_bos_itself: bool = False


def export_card(facts: ExportFacts) -> str:
    """The whole text."""
    parts = [
        f"---\n{yaml.safe_dump(_header(facts), sort_keys=False, allow_unicode=True)}---",
        f"# {facts.name}",
        _summary(facts),
        f"## Use\n\n```python\n{usage_code(facts)}```{_ollama(facts)}",
        f"## Certificate\n\n{_checks(facts.record)}",
        facts.trained,
        "`export.json` holds the SHA-256 of everything that went in and came out.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def usage_code(facts: ExportFacts) -> str:
    """Python that loads the model from the folder of the card and answers one prompt."""
    if facts.has_template:
        encode = [
            f'messages = [{{"role": "user", "content": "{EXAMPLE_PROMPT}"}}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
    else:
        start = "tokenizer.bos_token + " if facts.puts_bos_itself else ""
        encode = [f'inputs = tokenizer({start}"{EXAMPLE_PROMPT}", return_tensors="pt")']
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n",
        'folder = "."  # this folder, or the hub id it was published under',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        *encode,
        "output = model.generate(**inputs, max_new_tokens=64)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return "".join(f"{line}\n" for line in lines)


def check_lines(record: Mapping[str, Any]) -> list[str]:
    """One line per comparison, for the screen and the card."""
    return [
        f"{_words(name)}: largest logit difference {check['largest_difference']:.2g}, "
        f"{check['share_of_largest_logit']:.2g} of the largest logit (allowed {check['limit']:.2g}); "
        f"same likeliest token at {check['top1_agreement']:.1%} of {check['positions']:,} positions{_effect(check)}"
        for name, check in record["checks"].items()
    ]


def _words(name: str) -> str:
    """Of several adapters each comparison is named by its number and adapter."""
    number, colon, adapter = name.partition(": ")
    return f"adapter {number}, {adapter}, over what came before, and merged" if colon else _WORDS.get(name, name)


def _effect(check: Mapping[str, Any]) -> str:
    if "adapter_changes" not in check:
        return ""
    return f"; the adapter itself changes logits by up to {check['adapter_changes']:.2g}"


def _header(facts: ExportFacts) -> dict[str, Any]:
    header: dict[str, Any] = {"library_name": "transformers"}
    if facts.base_is_hub_id:
        header["base_model"], header["base_model_relation"] = facts.base, "finetune"
    header["pipeline_tag"] = "text-generation"
    header["tags"] = ["surefoot", "merged" if facts.adapters else "exported"]
    return header


def _summary(facts: ExportFacts) -> str:
    name = facts.base if facts.base_is_hub_id else re.split(r"[\\/]", facts.base.rstrip("\\/"))[-1]
    base = f"[{name}](https://huggingface.co/{name})" if facts.base_is_hub_id else f"`{name}`"
    revision = f" (revision `{facts.base_revision}`)" if facts.base_revision else ""
    dtype, stored = facts.record["dtype"], facts.record["stored_dtype_of_base"]
    if facts.adapters:
        text = f"{base}{revision} with {', then '.join(facts.adapters)} merged into it, in fp32, and cast to {dtype}."
    else:
        text = f"The weights of {base}{revision}, in {dtype}" + ("." if dtype == stored else f" (they were {stored}).")
    return "\n".join([text, *(f"\n- {note}" for note in facts.record["notes"])])


def _checks(record: Mapping[str, Any]) -> str:
    prompts = record["prompts"]
    asked = f"Compared on {prompts['from']} ({prompts['count']} texts, {prompts['tokens']:,} tokens):"
    return "\n".join([asked, "", *(f"- {line}" for line in check_lines(record))])


def _ollama(facts: ExportFacts) -> str:
    return "\n\nOllama: `ollama create my-model -f Modelfile`, in this folder." if facts.modelfile else ""
