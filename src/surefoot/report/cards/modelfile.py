"""A Modelfile for Ollama: the weights, the template that trained, and the tokens that end an answer.

Ollama's templates are Go's. A named template is a row of plain strings, so it is written out, not translated; what Go
cannot do as the row does is left out with its reason, never replaced by something near. BOS is written where training
began with it and the runner does not put it in front, as the model's metadata say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from surefoot.families.templates import Dialogue, Prompt, Row


@dataclass(frozen=True)
class Served:
    """source: what FROM names. row: the template, None where there is none, and then `without` says why, as a sentence.
    eos, bos: texts of these tokens. stops: tokens that end an answer. begins: what stands before every prompt and the
    runner does not write, "" where there is none. notes: comments on what the runner does otherwise than training."""

    source: str
    row: Row | None
    without: str
    eos: str
    bos: str
    stops: tuple[str, ...]
    begins: str = ""
    notes: tuple[str, ...] = ()


def modelfile_text(served: Served) -> str:
    """The whole file. Use it with `ollama create NAME -f Modelfile`, in its folder."""
    lines = ["# ollama create my-model -f Modelfile", f"FROM {served.source}"]
    obstacle = served.without if served.row is None else template_obstacle(served.row) or _token_obstacle(served)
    if served.row is None or obstacle:
        lines += [
            f"# TEMPLATE is left out: {obstacle}.",
            "# Ollama guesses one then, and it may be wrong: lay prompts out by the tokenizer's and send them raw.",
        ]
        if served.begins.isprintable() and served.begins:
            lines.append(f"# Begin them with {served.begins}, as training did: Ollama does not.")
    else:
        begins = f"{{{{ {_go(served.begins)} }}}}" if served.begins else ""
        lines.append(f'TEMPLATE """{begins}{go_template(served.row, eos=served.eos, bos=served.bos)}"""')
        if isinstance(served.row, Dialogue) and served.row.default_system:
            lines.append(f'SYSTEM """{served.row.default_system}"""')
        lines += [f"# {note}" for note in _notes(served.row)]
    lines += [f"# {note}" for note in served.notes]
    told = [stop for stop in served.stops if stop.isprintable() and '"' not in stop]
    lines += [f'PARAMETER stop "{stop}"' for stop in told]
    if len(told) < len(served.stops):
        lines.append("# A token that ends an answer is left out: a Modelfile holds no quotes and line ends in it.")
    return "\n".join(lines) + "\n"


def template_obstacle(row: Row) -> str:
    """Why Go's templates cannot write what the row writes, as a sentence; empty where they can."""
    if isinstance(row, Dialogue) and row.lead:
        return (
            f"in the {row.name} template the model begins its answers with {row.lead!r}, which Ollama may or may not "
            "keep in earlier answers"
        )
    if isinstance(row, Dialogue) and row.takes_text:
        return f"the {row.name} template may have trained on texts to be continued, or on questions"
    if isinstance(row, Dialogue) and row.between:
        return f"the {row.name} template writes {row.between} before later questions"
    if '"""' in "".join(value for value in vars(row).values() if isinstance(value, str)):
        return f"the {row.name} template holds three quotes in a row, which end a text in a Modelfile"
    return ""


def _token_obstacle(served: Served) -> str:
    """Tokens come with the model: one that closed the text it stands in could go on with directives of its own."""
    written = (served.eos, served.bos, served.begins)
    if all(token.isprintable() and not set(token) & set('"\\') for token in written):
        return ""
    return "the model's first or last token holds quotes, backslashes or control characters"


def go_template(row: Row, *, eos: str, bos: str) -> str:
    """The row in Go. Raises ValueError for one with an obstacle."""
    if obstacle := template_obstacle(row):
        raise ValueError(obstacle)
    text = "".join(_prompt(row) if isinstance(row, Prompt) else _dialogue(row))
    return text.replace("{eos}", eos).replace("{bos}", bos)


def _dialogue(row: Dialogue) -> Iterator[str]:
    """One loop over the messages. A system text is written where it comes, or kept for the first user turn."""
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
    """The newest question alone: the template holds one."""
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
        return ["In training, blanks around a text were taken away; Ollama sends them."]
    return []


def _go(text: str) -> str:
    """A string literal of Go, whose escapes are JSON's but for the quotes of a Modelfile's text."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{quoted}"'
