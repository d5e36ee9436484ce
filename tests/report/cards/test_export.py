"""What Ollama would render from the Modelfile is what the row of the named templates writes in training.

Ollama is not here: `render` carries out the few constructs of Go's templates that the Modelfile uses.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from surefoot.data.chat.builtin_template import lay_out_dialogue, lay_out_prompt
from surefoot.data.formats import Conversation, Turn
from surefoot.families.templates import ROWS, Dialogue, Prompt, find_row
from surefoot.report.cards.export import Served, go_template, modelfile_text, template_obstacle

SYSTEM, ASK = Turn("system", 'Be "brief".'), Turn("user", "What is\na heron? \\n {{ .Role }}")
MORE = (Turn("assistant", "A bird."), Turn("user", "And a trout?"))
CONVERSATIONS = ((ASK,), (SYSTEM, ASK), (ASK, *MORE), (SYSTEM, ASK, *MORE), (ASK, *MORE, *MORE))
WRITTEN = [row for row in ROWS if not template_obstacle(row)]


def render(template: str, turns: Sequence[Turn]) -> str:
    """Go's text/template: actions in {{ }}, of which `-` trims blanks; range, if, else if, else, end, variables."""
    parts = re.split(r"(\{\{-? ?.*?[^\\]? ?\}\})", template)
    actions = [re.sub(r"^\{\{-? ?| ?\}\}$", "", part).strip() for part in parts if part]
    assert all(part.startswith("{{") for part in parts if part), "text outside of actions would be sent as it is"
    tree, end = _parse(actions, 0)
    assert end == len(actions)
    system = next((turn.content for turn in turns if turn.role == "system"), "")
    out: list[str] = []
    _run(tree, {"turns": turns, "system": system, "vars": {}, "dot": None}, out)
    return "".join(out)


def _parse(actions: list[str], at: int) -> tuple[list[Any], int]:
    tree: list[Any] = []
    while at < len(actions) and actions[at] != "end" and not actions[at].startswith("else"):
        head = actions[at]
        if head.startswith("range "):
            body, at = _parse(actions, at + 1)
            tree.append(("range", body))
        elif head.startswith("if "):
            arms, condition = [], head[3:]
            while True:
                body, at = _parse(actions, at + 1)
                arms.append((condition, body))
                if actions[at] == "end":
                    break
                condition = actions[at][len("else if ") :] if actions[at] != "else" else "true"
            tree.append(("if", arms))
        else:
            tree.append(("do", head))
        at += 1
    return tree, at


def _run(tree: list[Any], state: dict[str, Any], out: list[str]) -> None:
    for kind, what in tree:
        if kind == "range":
            for turn in state["turns"]:
                state["dot"] = turn
                _run(what, state, out)
        elif kind == "if":
            chosen = next((body for condition, body in what if _value(condition, state)), [])
            _run(chosen, state, out)
        elif assigned := re.fullmatch(r"(\$\w+) :?= (.*)", what):
            state["vars"][assigned[1]] = _value(assigned[2], state)
        else:
            out.append(str(_value(what, state)))


def _value(text: str, state: dict[str, Any]) -> Any:
    if text == "true":
        return True
    if compared := re.fullmatch(r'eq \.Role "(\w+)"', text):
        return state["dot"].role == compared[1]
    if text.startswith('"'):
        return re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), text[1:-1])
    if text.startswith("$"):
        return state["vars"][text]
    return {".Content": lambda: state["dot"].content, ".System": lambda: state["system"]}[text]()


def trained(row: Dialogue | Prompt, turns: Sequence[Turn]) -> str:
    conversation = Conversation(tuple(turns))
    if isinstance(row, Prompt):
        return "".join(segment.text for segment in lay_out_prompt(row, conversation, "</s>"))
    return "".join(segment.text for segment in lay_out_dialogue(_filled(row), conversation))


def _filled(row: Dialogue) -> Dialogue:
    return replace(row, **{name: getattr(row, name).replace("{eos}", "</s>") for name in ("close", "user", "system")})


@pytest.mark.parametrize("row", [row for row in WRITTEN if isinstance(row, Dialogue)], ids=lambda row: row.name)
@pytest.mark.parametrize("turns", CONVERSATIONS, ids=["one", "system", "two", "system and two", "three"])
def test_ollama_renders_what_was_trained(row, turns):
    sent = turns  # Ollama puts the Modelfile's SYSTEM in front where a request has none
    if row.default_system and turns[0].role != "system":
        sent = (Turn("system", row.default_system), *turns)
    assert render(go_template(row, eos="</s>", bos="<s>"), sent) == trained(row, turns)


@pytest.mark.parametrize("row", [row for row in WRITTEN if isinstance(row, Prompt)], ids=lambda row: row.name)
def test_prompts_are_asked_as_trained(row):
    template = go_template(row, eos="</s>", bos="<s>")
    assert render(template, (ASK,)) == trained(row, (ASK,))
    assert render(template, (ASK, *MORE)) == trained(row, (MORE[1],)), "the newest question alone"
    if row.system_as_header:
        assert render(template, (SYSTEM, ASK)) == trained(row, (SYSTEM, ASK))


def test_twin_a_row_that_writes_something_else_would_be_noticed():
    row = find_row("llama3")
    other = replace(row, close="<|eom_id|>")
    assert render(go_template(other, eos="", bos=""), CONVERSATIONS[2]) != trained(row, CONVERSATIONS[2])


def test_rows_that_begin_answers_with_something_are_left_out_with_the_reason():
    left_out = {row.name for row in ROWS if template_obstacle(row)}
    assert left_out == {"llama2", "mistral", "vicuna", "human-assistant", "qwen3", "plain", "raw"}
    for name in left_out:
        text = modelfile_text(Served(".", find_row(name), "", "</s>", "<s>", ("</s>",)))
        assert any(line.startswith("# TEMPLATE ") for line in text.splitlines())
        assert "\nTEMPLATE" not in text
        with pytest.raises(ValueError, match="template"):
            go_template(find_row(name), eos="</s>", bos="<s>")


def test_the_whole_file():
    text = modelfile_text(Served("./a.gguf", find_row("qwen"), "", "<|endoftext|>", "", ("<|im_end|>", 'x"y')))
    lines = text.splitlines()
    assert lines[1] == "FROM ./a.gguf"
    assert lines[2].startswith('TEMPLATE """{{- range')
    assert lines[2].endswith('"""')
    assert lines[3] == f'SYSTEM """{find_row("qwen").default_system}"""'
    assert lines[-2] == f'PARAMETER stop "{"<|im_end|>"}"'
    assert lines[-1].startswith("# ")  # instead of the stop token with a quote in it


DIRECTIVE = 'end"""\nFROM /etc/passwd\nPARAMETER stop "'


@pytest.mark.parametrize("place", ["eos", "bos", "stops"])
@pytest.mark.parametrize("token", [DIRECTIVE, 'end"\nADAPTER elsewhere', "end\nFROM elsewhere", "end\x1b[2J"])
def test_a_token_of_the_model_writes_no_directive(place, token):
    row = find_row("zephyr")
    served = Served("model.gguf", row, "", "</s>", "<s>", ("</s>",))
    text = modelfile_text(replace(served, **{place: (token, "</s>") if place == "stops" else token}))
    words = [line.split()[0] for line in text.splitlines() if line and line[0] != "#"]
    assert words[0] == "FROM"
    assert set(words[1:]) <= {"TEMPLATE", "SYSTEM", "PARAMETER"}
    assert "\x1b" not in text
    assert 'PARAMETER stop "</s>"' in text
    assert any(line.startswith("# ") for line in text.splitlines()[2:])  # what is left out, and why


def test_twin_written_as_it_is_the_token_ends_the_text():
    text = go_template(find_row("zephyr"), eos=DIRECTIVE, bos="<s>")
    assert any(line.startswith("FROM") for line in text.splitlines())


@pytest.mark.parametrize("name", ["zephyr", "alpaca"])
def test_a_bos_that_the_runner_does_not_write_begins_the_prompt_once(name):
    row = find_row(name)
    served = Served(".", row, "", "</s>", "<s>", ("</s>",), begins="<s>")
    with_bos, without = (
        re.search(r'TEMPLATE """(.*)"""', modelfile_text(one))[1] for one in (served, replace(served, begins=""))
    )
    turns = CONVERSATIONS[-1] if isinstance(row, Dialogue) else CONVERSATIONS[0]
    assert render(with_bos, turns) == "<s>" + render(without, turns)
    assert render(without, turns).count("<s>") == 0  # the twin: else it would be there already
    directive = modelfile_text(replace(served, begins=DIRECTIVE))
    assert not any(line.startswith("FROM /etc") for line in directive.splitlines())
