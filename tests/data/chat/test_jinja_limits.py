"""A template that would run or grow without end is one clear line, and soon."""

from __future__ import annotations

import jinja2.sandbox
import pytest

from surefoot.data.chat import render as chat_jinja
from surefoot.data.chat import sandbox
from surefoot.data.chat.render import TemplateFault
from surefoot.data.formats import Turn

DOUBLING = "{{% set ns = namespace(x='a') %}}\n{{% for n in range(90) %}}{}{{% endfor %}}"
TUPLES = (
    "{% set ns = namespace(x=(1,)) %}{% for n in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"  # 2^60 in one
)
SEARCH = "{{% set y = 'a' * 4999999 ~ 'b' ~ 'a' * 4999999 %}}{{{{ ('a' * 19999999).{} }}}}"  # 10^14 steps in one call
KEPT = "{{% set ns = namespace(x=[]) %}}{{% for n in range(40000) %}}{{% set ns.x = [ns.x, {}] %}}{{% endfor %}}"
ENDLESS = {  # line, source, and the limit or the kind of error
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
    "a macro that never ends": (1, "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    "doubling by ~": (2, DOUBLING.format("{% set ns.x = ns.x ~ ns.x %}"), "characters"),
    "doubling by +": (2, DOUBLING.format("{% set ns.x = ns.x + ns.x %}"), "characters"),
    "doubling by a block": (
        2,
        DOUBLING.format("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
        "characters",
    ),
    "a product": (1, "{{ 'a' * 99999999999 }}", "characters"),
    "much output": (1, "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "characters"),
    "a power": (1, "{{ 9 ** 9 ** 9 ** 9 }}", "SecurityError"),
    "padding": (1, "{{ 'x'.center(99999999999) }}", "SecurityError"),
    "formatting": (1, "{{ '%99999999999d' % 3 }}", "SecurityError"),
    "a budget of its own": (
        1,
        "{% set _surefoot_steps = [1000000000] %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
        "{% endfor %}",
        "steps",
    ),
    "a loop that calls itself": (
        1,
        "{% for a in range(999) recursive %}{% if loop.depth < 3 %}{{ loop(range(999)) }}{% endif %}{% endfor %}",
        "steps",
    ),
    "a loop under another name": (
        1,
        "{% for a in [0] if not a recursive %}{% set l = loop %}{% for b in range(99) %}{{ l(range(1, 99999)) }}"
        "{% endfor %}{% endfor %}",
        "steps",
    ),
    "a filter in a filter": (
        1,
        "{% set x = range(99999) | list %}{{ x | map('replace', 1, 2) | list | length }}",
        "steps",
    ),
    "replace as a filter": (1, "{{ ('x' * 6000) | replace('x', 'y' * 6000) }}", "characters"),
    "replace as a method": (1, "{{ ('x' * 6000).replace('x', 'y' * 6000) }}", "characters"),
    "join as a filter": (1, "{{ range(9999) | join('y' * 6000) }}", "characters"),
    "join as a method": (1, "{{ ('y' * 6000).join('x' * 9999) }}", "characters"),
    "join of long items": (1, "{{ ([('y' * 6000)] * 9999) | join }}", "characters"),
    "a long sum of texts": (1, "{% set x = 'y' * 9999999 %}{{ x ~ x ~ x }}", "characters"),
    "a list that holds one list twice": (
        1,
        DOUBLING.format("{% set ns.x = [ns.x, ns.x] %}").replace("\n", "") + "{{ ns.x }}",
        "items",
    ),
    "a list that doubles": (2, DOUBLING.format("{% set ns.x = [1] + (ns.x | list) + (ns.x | list) %}"), "items"),
    "a list times a number": (1, "{{ [1] * 99999999999 }}", "characters"),
    "a number that squares": (
        2,
        "{% set ns = namespace(x=9) %}\n{% for n in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "whole",
    ),
    "rounding": (1, "{{ 1.5 | round(99999999999, 'floor') }}", "digits"),
    "wide JSON": (1, "{{ [1] | tojson(indent=9999999999) }}", "TemplateError"),
    "JSON with a text for indents": (1, "{{ [[1]] | tojson(indent='x' * 9999999) }}", "TemplateError"),
    "much output of a macro": (
        1,
        "{% macro f(x) %}{% for a in range(99999) %}{{ x }}{% endfor %}{% endmacro %}{% set y = f('a' * 99999) %}",
        "characters",
    ),
    "plain text in loops": (
        1,
        "{% set y %}{% for a in range(9999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
        "characters",
    ),
    "batches": (1, "{{ [1] | batch(99999999999, 1) | list }}", "TemplateAssertionError"),
    "translation": (1, "{{ 'x'.translate({120: 'y'}) }}", "SecurityError"),
    "a date": (1, "{{ strftime_now('%Y' * 9999) }}", "TemplateError"),
    "a range": (2, "\n{% for a in range(1000000000) %}{% endfor %}", "OverflowError"),
    "depth": (
        1,
        "{% set ns = namespace(x=1) %}{% for n in range(40000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
        "levels",
    ),
    "a search from behind": (1, SEARCH.format("rpartition(y)"), "searched"),
    "a split by name": (1, SEARCH.format("rsplit(sep=y)"), "searched"),
    "a place by another way": (1, "{{ (('a' * 19999999) | attr('rfind'))('a' * 4999999 ~ 'b') }}", "searched"),
    "a strip": (1, "{{ ('a' * 9999999).strip('b' * 9999999 ~ 'a') }}", "searched"),
    "a trim": (1, "{{ ('a' * 9999999) | trim('b' * 9999999 ~ 'a') }}", "searched"),
    "a number of many digits": (1, "{{ ('f' * 9000000) | int(base=16) // 3 }}", "whole"),
    "a sum of numbers": (1, "{{ ([2000000000000000000] * 9) | sum }}", "whole"),
    "formatting by a test": (1, "{{ '%99999999999d' is odd }}{{ '%99999999999d' is divisibleby(3) }}", "SecurityError"),
    "formatting by even in select": (1, "{{ ['%99999999999d'] | select('even') | list }}", "SecurityError"),
    "lists that are kept": (1, KEPT.format("[0] * 999999"), "items"),
    "wide texts that are kept": (1, KEPT.format("'\U0001f600' * 9000000"), "characters"),
    "formatting by a method": (1, "{{ '{:99999999999}'.format(3) }}", "SecurityError"),
    "tuples of tuples": (1, TUPLES + "{{ {ns.x: 1} }}", "items"),
    "a generator of long texts": (1, "{{ range(99999) | map('replace', '1', 'y' * 99999) | list }}", "characters"),
}
UNCHANGED = [
    "{% for m in messages %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.role }}{% else %}none{% endfor %}",
    "{% for key, value in {'a': 1, 'b': 2}.items() %}{{ key ~ value }}{% endfor %}",
    "{% for x in undefined_name %}{{ x }}{% else %}empty{% endfor %}",
    "{% set x | upper %}a{{ 'b' ~ 1 }}{% endset %}{{ x }}{% filter upper %}c{% endfilter %}{{ 7 % 4 }}",
    "{{ 2 * 'ab' ~ 'c' + 'd' }}{{ [1] + [2] }}",
    "{{ 7 - 2 }}{{ 7 / 2 }}{{ 7 // 2 }}{{ -7 }}{{ 4 is even }}{{ 9 is divisibleby 3 }}",
    "{{ 'a' is lower }}{{ '12' | int }}{{ ' a ' | trim }}{{ 'ab'.rfind('b') }}{{ 2.0.is_integer() }}",
    "{{ ' a'.strip().rsplit('a', 1) }}{{ 'a</b>c'.split('</b>')[-1].rstrip('c') }}",
    "{% set x = 'a' %}{{ {x: {(1, 2): 3}}[x][(1, 2)] }}{{ messages[-1].get('role') }}{{ dict([(1, 2)]) }}",
    "{{ messages | map(attribute='role') | unique | list }}",
    "{{ messages | selectattr('role', 'in', ['user']) | list | length }}",
    "{% set y = namespace(x=[1]) %}{% for m in messages %}{% set y.x = y.x + [m.role] %}{% endfor %}{{ y.x }}",
    "{% macro f(x, y='d') %}[{{ x ~ y }}{{ caller() if caller else '' }}]{% endmacro %}"
    "{{ f('a') }}{% call f('b') %}c{% endcall %}",
]


@pytest.fixture(autouse=True)
def compiled_anew():
    chat_jinja._compile.cache_clear()
    yield
    chat_jinja._compile.cache_clear()


def render(source, turns=()):
    return chat_jinja.render(source, turns, {}, generation_prompt=False)


def refused(source):
    """The line that is named, and the limit or the kind of error."""
    with pytest.raises(TemplateFault) as caught:
        render(source)
    assert "\n" not in caught.value.what
    cause = caught.value.__context__
    return caught.value.line, getattr(cause, "limit", type(cause).__name__)


def test_what_runs_or_grows_without_end_is_stopped_at_its_line(monkeypatch):
    monkeypatch.setattr(sandbox, "STEPS", 50_000)  # the same, sooner
    monkeypatch.setattr(sandbox, "ITEMS", 100_000)
    found = {name: refused(source) for name, (_, source, _) in ENDLESS.items()}
    assert found == {name: (line, limit) for name, (line, _, limit) in ENDLESS.items()}


def test_computing_time_is_the_last_net(monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.0)
    assert refused("{% for a in [1] %}{% endfor %}") == (1, "seconds")


def test_one_rendering_leaves_the_next_its_budget(monkeypatch):
    monkeypatch.setattr(sandbox, "STEPS", 100)
    for _ in range(3):
        render("{% for a in range(99) %}{% endfor %}")


TWINS = {  # what protects, what it refuses, what comes without it
    "step": (lambda: None, "{% for a in range(9) %}{% endfor %}done", "done"),
    "_check": (lambda *_: None, "{{ 'aab'.rfind('b') }}", "2"),
    "measured": (lambda value: value, "{{ 9999999999 * 9999999999 }}", "99999980000000001"),
    "_fits": (lambda *_: None, "{{ [1] * 3 }}", "[1, 1, 1]"),
    "_of_number": (lambda test: test, "{{ '%d' is divisibleby(3) }}", "False"),
    "_NO_METHODS": ((), "{{ 'a'.center(3) }}", " a "),
    "_NO_FILTERS": ((), "{{ 'a' | center(3) }}", " a "),
}


@pytest.mark.parametrize("name", TWINS)
def test_twin_each_check_is_what_refuses(name, monkeypatch):
    without, source, text = TWINS[name]
    for limit in ("ITEMS", "SEARCHED", "STEPS"):
        monkeypatch.setattr(sandbox, limit, 2)
    refused(source)
    monkeypatch.setattr(sandbox, name, without)
    chat_jinja._compile.cache_clear()
    assert text in render(source)


def test_a_long_conversation_is_far_from_the_limits(monkeypatch):
    turns = [Turn("user", "Go."), Turn("assistant", "word " * 1000)] * 500
    monkeypatch.setattr(sandbox, "STEPS", sandbox.STEPS // 10)
    assert len(render("{% for m in messages %}{{ m.role + m.content ~ '\n' }}{% endfor %}", turns)) > 2_500_000


def test_within_the_limits_nothing_changes():
    turns = [Turn("user", "a"), Turn("assistant", "b")]
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    for source in UNCHANGED:
        assert render(source, turns) == plain.from_string(source).render(messages=messages), source
