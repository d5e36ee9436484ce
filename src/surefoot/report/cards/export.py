"""README.md of an export, and a Modelfile for Ollama.

The README says what the export was made of and how it was checked, with runnable code. The Modelfile names the weights,
the chat template used in training, and the stop tokens. Ollama's templates are Go templates. A named template is a row
of plain strings, so it is written directly, not translated; what Go cannot express is left out with its reason, never
approximated. BOS is written if training began with it and the runner does not add it according to the model's metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from surefoot.families.model_facts import OPENED_BY
from surefoot.families.templates import Dialogue, Prompt, Row
from surefoot.report.footer import EXAMPLE_PROMPT
from surefoot.system.folders import CERTIFICATE as CERTIFICATE

_WORDS = {
    "adapter_and_merged": "adapter on its base and merged model (both in fp32)",
    "scaled_and_baked": "scaled BOS embedding and BOS row with the factor (both in fp32)",
    "reloaded_and_gguf": "these files and the GGUF file as loaded by transformers",
    "fp32_and_reloaded": "fp32 model and these files as loaded by transformers",
}


@dataclass(frozen=True)
class ExportFacts:
    """Facts for an export's card.

    base, base_revision: the model below the adapters, as the user named it.
    adapters: one line each.
    record: the content of export.json.
    trained: sections of the run's own card, "" if there is none.
    puts_bos_itself: prompts without a template must begin with BOS, because the model was trained with it and the
        tokenizer does not add it.
    opened_by: transformers' class that loads the model.
    """

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
    opened_by: str = OPENED_BY


def export_card(facts: ExportFacts) -> str:
    """Return the text of the card."""
    parts = [
        f"---\n{yaml.safe_dump(_header(facts), sort_keys=False, allow_unicode=True)}---",
        f"# {facts.name}",
        _summary(facts),
        f"## Use\n\n```python\n{usage_code(facts)}```{_ollama(facts)}",
        f"## Certificate\n\n{_checks(facts.record)}",
        facts.trained,
        "`export.json` holds the SHA-256 of all inputs and outputs.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def usage_code(facts: ExportFacts) -> str:
    """Python that loads the model from the card's folder and answers one prompt."""
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
        f"from transformers import {facts.opened_by}, AutoTokenizer\n",
        'folder = "."  # this folder, or the hub id it was published under',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f"model = {facts.opened_by}.from_pretrained(folder)",
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
        f"same most likely token at {check['top1_agreement']:.1%} of {check['positions']:,} positions{_effect(check)}"
        for name, check in record["checks"].items()
    ]


def _words(name: str) -> str:
    """Name a comparison; with several adapters it has a number and the adapter's name."""
    number, colon, adapter = name.partition(": ")
    return f"adapter {number}, {adapter}, over the model so far, and merged" if colon else _WORDS.get(name, name)


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
    heading = f"Compared on {prompts['from']} ({prompts['count']} texts, {prompts['tokens']:,} tokens):"
    return "\n".join([heading, "", *(f"- {line}" for line in check_lines(record))])


def _ollama(facts: ExportFacts) -> str:
    return "\n\nOllama: `ollama create my-model -f Modelfile`, in this folder." if facts.modelfile else ""


@dataclass(frozen=True)
class Served:
    """Prompt settings for a Modelfile.

    source: what FROM names.
    row: the template; None if there is none, and then `without` says why, as a sentence.
    eos, bos: texts of these tokens.
    stops: tokens that end an answer.
    begins: text before every prompt that the runner does not add, or "".
    notes: comments on differences from training.
    """

    source: str
    row: Row | None
    without: str
    eos: str
    bos: str
    stops: tuple[str, ...]
    begins: str = ""
    notes: tuple[str, ...] = ()


def modelfile_text(served: Served) -> str:
    """Return the Modelfile. Use it in its folder with `ollama create NAME -f Modelfile`."""
    lines = ["# ollama create my-model -f Modelfile", f"FROM {served.source}"]
    obstacle = served.without if served.row is None else template_obstacle(served.row) or _token_obstacle(served)
    if served.row is None or obstacle:
        lines += [
            f"# TEMPLATE is left out: {obstacle}.",
            "# Ollama then guesses one, perhaps wrongly: format prompts with the tokenizer's template, send them raw.",
        ]
        if served.begins.isprintable() and served.begins:
            lines.append(f"# Begin them with {served.begins}, as in training: Ollama does not.")
    else:
        begins = f"{{{{ {_go(served.begins)} }}}}" if served.begins else ""
        lines.append(f'TEMPLATE """{begins}{go_template(served.row, eos=served.eos, bos=served.bos)}"""')
        if isinstance(served.row, Dialogue) and served.row.default_system:
            lines.append(f'SYSTEM """{served.row.default_system}"""')
        lines += [f"# {note}" for note in _notes(served.row)]
    lines += [f"# {note}" for note in served.notes]
    writable = [stop for stop in served.stops if stop.isprintable() and '"' not in stop]
    lines += [f'PARAMETER stop "{stop}"' for stop in writable]
    if len(writable) < len(served.stops):
        lines.append("# A token that ends an answer is left out: a Modelfile cannot hold its quotes or line ends.")
    return "\n".join(lines) + "\n"


def template_obstacle(row: Row) -> str:
    """Why a Go template cannot write what this row writes, as a sentence; empty if it can."""
    if isinstance(row, Dialogue) and row.lead:
        return (
            f"in the {row.name} template the model begins its answers with {row.lead!r}, which Ollama may or may not "
            "keep in earlier answers"
        )
    if isinstance(row, Dialogue) and row.takes_text:
        return f"the {row.name} template may have been trained on texts to continue or on questions"
    if isinstance(row, Dialogue) and row.between:
        return f"the {row.name} template writes {row.between} before later questions"
    if '"""' in "".join(value for value in vars(row).values() if isinstance(value, str)):
        return f"the {row.name} template contains three quotes in a row, which end a text in a Modelfile"
    return ""


def _token_obstacle(served: Served) -> str:
    """Check tokens that come with the model: one that closed its quotes could add directives of its own."""
    written = (served.eos, served.bos, served.begins)
    if all(token.isprintable() and not set(token) & set('"\\') for token in written):
        return ""
    return "the model's first or last token contains quotes, backslashes or control characters"


def go_template(row: Row, *, eos: str, bos: str) -> str:
    """Write the row as a Go template. Raises ValueError if it has an obstacle."""
    if obstacle := template_obstacle(row):
        raise ValueError(obstacle)
    text = "".join(_prompt(row) if isinstance(row, Prompt) else _dialogue(row))
    return text.replace("{eos}", eos).replace("{bos}", bos)


def _dialogue(row: Dialogue) -> Iterator[str]:
    """One loop over the messages. A system text is written in place, or kept for the first user turn."""
    user, system = row.user.replace("{content}", "{{ .Content }}"), row.system.split("{content}")
    if row.merged:
        yield '{{- $head := "" }}'
    yield "{{- range $place, $_ := .Messages }}"
    yield '{{- if eq .Role "system" }}'
    if row.merged:
        yield "{{- $head = .Content }}"
    else:
        yield f"{{{{ {_go(system[0])} }}}}{{{{ .Content }}}}{{{{ {_go(system[1])} }}}}"
    yield '{{- else if eq .Role "user" }}'
    if row.merged:
        merged = f"{{{{ if $head }}}}{{{{ {_go(system[0])} }}}}{{{{ $head }}}}{{{{ {_go(system[1])} }}}}{{{{ end }}}}"
        left, right = user.split("{{ .Content }}")
        yield f'{{{{ {_go(left)} }}}}{merged}{{{{ .Content }}}}{{{{ {_go(right)} }}}}{{{{- $head = "" }}}}'
    else:
        left, right = user.split("{{ .Content }}")
        yield f"{{{{ {_go(left)} }}}}{{{{ .Content }}}}{{{{ {_go(right)} }}}}"
    yield '{{- else if eq .Role "assistant" }}'
    yield f"{{{{ {_go(row.opening)} }}}}{{{{ .Content }}}}{{{{ {_go(row.close + row.after)} }}}}"
    yield "{{- end }}{{- end }}"
    yield f"{{{{ {_go(row.opening)} }}}}"


def _prompt(row: Prompt) -> Iterator[str]:
    """Only the newest question: the template holds one."""
    yield '{{- $ask := "" }}{{- range .Messages }}{{- if eq .Role "user" }}{{- $ask = .Content }}{{- end }}{{- end }}'
    if row.system_as_header:
        yield f"{{{{- if .System }}}}{{{{ .System }}}}{{{{ else }}}}{{{{ {_go(row.header)} }}}}{{{{ end }}}}"
    else:
        yield f"{{{{- {_go(row.header)} }}}}"
    left, right = row.instruction.split("{content}")
    yield f"{{{{ {_go(left)} }}}}{{{{ $ask }}}}{{{{ {_go(right + row.response)} }}}}"


def _notes(row: Row) -> list[str]:
    if isinstance(row, Prompt):
        return ["This template holds one question: earlier ones of a chat are not sent."]
    if row.trimmed:
        return ["In training, blanks around a text were stripped; Ollama sends them."]
    return []


def _go(text: str) -> str:
    """A Go string literal: JSON's escapes, except for the quotes of a Modelfile's text."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{quoted}"'
