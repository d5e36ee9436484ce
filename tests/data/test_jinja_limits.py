"""A template that would run or grow without end is one clear line, and soon."""

from __future__ import annotations

import pytest

from surefoot.data import chat_jinja, jinja_limits
from surefoot.data.chat_jinja import TemplateFault
from surefoot.data.formats import Turn

DOUBLING = "{{% set ns = namespace(x='a') %}}\n{{% for n in range(90) %}}{}{{% endfor %}}"
ENDLESS = {
    "nested loops": (1, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
    "a filtered loop": (
        1,
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "steps",
    ),
    "a macro that calls itself twice": (
        1,
        "{%- macro f(n) -%}{%- if n -%}{{ f(n - 1) }}\n{{ f(n - 1) }}{%- endif -%}{%- endmacro -%}{{ f(25) }}",
        "steps",
    ),
    "a macro that never ends": (1, "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "doubling by ~": (2, DOUBLING.format("{% set ns.x = ns.x ~ ns.x %}"), "characters"),
    "doubling by +": (2, DOUBLING.format("{% set ns.x = ns.x + ns.x %}"), "characters"),
    "doubling by a block": (
        2,
        DOUBLING.format("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
        "characters",
    ),
    "a product": (1, "{{ 'a' * 99999999999 }}", "characters"),
    "much output": (1, "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "characters"),
    "a power": (1, "{{ 9 ** 9 ** 9 ** 9 }}", "not offered"),
    "padding": (1, "{{ 'x'.center(99999999999) }}", "unsafe"),
    "formatting": (1, "{{ '%99999999999d' % 3 }}", "not offered"),
    "a range": (2, "\n{% for a in range(1000000000) %}{% endfor %}", "range"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_ends_in_one_line_that_names_the_place(name, monkeypatch):
    line, source, reason = ENDLESS[name]
    monkeypatch.setattr(jinja_limits, "STEPS", 50_000)  # the same, sooner
    with pytest.raises(TemplateFault) as caught:
        chat_jinja.render(source, [], {}, generation_prompt=False)
    assert reason in caught.value.problem
    assert "\n" not in caught.value.what
    assert caught.value.line == line


def test_a_long_conversation_is_far_from_the_limits(monkeypatch):
    turns = [Turn("user", "Go."), Turn("assistant", "word " * 1000)] * 500
    monkeypatch.setattr(jinja_limits, "STEPS", jinja_limits.STEPS // 10)
    source = "{% for m in messages %}{{ m.role + m.content ~ '\n' }}{% endfor %}"
    assert len(chat_jinja.render(source, turns, {}, generation_prompt=False)) > 2_500_000


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{% endfor %}",
        "{% for m in messages %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
        "{% for m in messages recursive %}{{ m.role }}{% else %}none{% endfor %}",
        "{% for key, value in {'a': 1, 'b': 2}.items() %}{{ key ~ value }}{% endfor %}",
        "{% for x in undefined_name %}{{ x }}{% else %}empty{% endfor %}",
        "{% set x | upper %}a{{ 'b' ~ 1 }}{% endset %}{{ x }}{% filter upper %}c{% endfilter %}{{ 7 % 4 }}",
        "{{ 2 * 'ab' ~ 'c' + 'd' }}{{ [1] + [2] }}",
        "{% macro f(x, y='d') %}[{{ x ~ y }}{{ caller() if caller else '' }}]{% endmacro %}"
        "{{ f('a') }}{% call f('b') %}c{% endcall %}",
    ],
)
def test_within_the_limits_nothing_changes(source):
    import jinja2.sandbox

    turns = [Turn("user", "a"), Turn("assistant", "b")]
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = plain.from_string(source).render(messages=[{"role": t.role, "content": t.content} for t in turns])
    assert chat_jinja.render(source, turns, {}, generation_prompt=False) == expected


def test_twin_without_the_budget_a_loop_goes_on(monkeypatch):
    monkeypatch.setattr(jinja_limits, "_step", lambda context: None)
    source = "{% for a in range(1000) %}{% for b in range(100) %}{% endfor %}{% endfor %}done"
    monkeypatch.setattr(jinja_limits, "STEPS", 50_000)
    assert chat_jinja.render(source, [], {}, generation_prompt=False) == "done"
