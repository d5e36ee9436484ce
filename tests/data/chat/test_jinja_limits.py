"""A template that would run or grow without end is one clear line, and soon."""

from __future__ import annotations

import pytest

from surefoot.data.chat import render as chat_jinja
from surefoot.data.chat import sandbox as jinja_budget
from surefoot.data.chat import sandbox as jinja_limits
from surefoot.data.chat.render import TemplateFault
from surefoot.data.formats import Turn

DOUBLING = "{{% set ns = namespace(x='a') %}}\n{{% for n in range(90) %}}{}{{% endfor %}}"
TUPLES = (
    "{% set ns = namespace(x=(1,)) %}{% for n in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"  # 2^60 in one
)
SEARCH = "{{% set y = 'a' * 4999999 ~ 'b' ~ 'a' * 4999999 %}}{{{{ ('a' * 19999999).{} }}}}"  # 10^14 steps in one call
KEPT = "{{% set ns = namespace(x=[]) %}}{{% for n in range(40000) %}}{{% set ns.x = [ns.x, {}] %}}{{% endfor %}}"
HALVES = "{% set t = '\U0001f600' * 900000 ~ ',' ~ 'a' * 900000 %}" + KEPT.format("t.split(',')")
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
    "a filtered loop that calls itself": (
        1,
        "{% for a in range(9) if a recursive %}{% for b in [1] %}{{ loop(range(99999)) }}{% endfor %}{% endfor %}",
        "recursi",
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
    "a test in a filter": (1, "{{ range(99999) | select('in', [1, 2]) | list | length }}", "steps"),
    "replace as a filter": (1, "{{ ('x' * 6000) | replace('x', 'y' * 6000) }}", "characters"),
    "replace as a method": (1, "{{ ('x' * 6000).replace('x', 'y' * 6000) }}", "characters"),
    "join as a filter": (1, "{{ range(9999) | join('y' * 6000) }}", "characters"),
    "join as a method": (1, "{{ ('y' * 6000).join('x' * 9999) }}", "characters"),
    "join of long items": (1, "{{ ([('y' * 6000)] * 9999) | join }}", "characters"),
    "a long sum of texts": (1, "{% set x = 'y' * 9999999 %}{{ x ~ x ~ x }}", "characters"),
    "a list that holds one list twice": (
        1,
        DOUBLING.format("{% set ns.x = [ns.x, ns.x] %}").replace("\n", "") + "{{ ns.x }}",
        "list of more than",
    ),
    "the same as JSON": (
        1,
        DOUBLING.format("{% set ns.x = {1: ns.x, 2: ns.x} %}").replace("\n", "") + "{{ ns.x | tojson }}",
        "list of more than",
    ),
    "the same compared": (
        1,
        DOUBLING.format("{% set ns.x = [ns.x, ns.x] %}").replace("\n", "") * 2 + "{{ ns.x == [ns.x] }}",
        "list of more than",
    ),
    "a list that doubles": (2, DOUBLING.format("{% set ns.x = [1] + (ns.x | list) + (ns.x | list) %}"), "list of more"),
    "a list times a number": (1, "{{ [1] * 99999999999 }}", "list of more than"),
    "a number that squares": (
        2,
        "{% set ns = namespace(x=9) %}\n{% for n in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "number without end",
    ),
    "rounding": (1, "{{ 1.5 | round(99999999999, 'floor') }}", "digits"),
    "wide JSON": (1, "{{ [1] | tojson(indent=9999999999) }}", "indent"),
    "JSON with a text for indents": (1, "{{ [[1]] | tojson(indent='x' * 9999999) }}", "indent"),
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
    "batches": (1, "{{ [1] | batch(99999999999, 1) | list }}", "batch"),
    "translation": (1, "{{ 'x'.translate({120: 'y'}) }}", "unsafe"),
    "a date": (1, "{{ strftime_now('%Y' * 9999) }}", "date"),
    "a range": (2, "\n{% for a in range(1000000000) %}{% endfor %}", "range"),
    "a nested key looked up": (1, TUPLES + "{{ {'a': 1}[ns.x] }}", "list of more than"),
    "a nested key of a dict": (1, TUPLES + "{{ {ns.x: 1} | length }}", "list of more than"),
    "a nested key for get": (1, TUPLES + "{{ {}.get(ns.x) }}", "list of more than"),
    "a nested key of pairs": (1, TUPLES + "{{ dict([(ns.x, 1)]) }}", "list of more than"),
    "a nested key of a generator": (1, TUPLES + "{{ dict([(ns.x, 1)] | map('list')) }}", "list of more than"),
    "a nested attribute": (1, TUPLES + "{{ [{}] | map(attribute=ns.x) | list }}", "list of more than"),
    "nested and made unique": (1, TUPLES + "{{ [ns.x] | map('default') | unique | list }}", "list of more than"),
    "nested behind a name": (1, TUPLES + "{{ [ns] | unique(attribute='x') | list }}", "inside a list"),
    "nested and a name of filters": (1, TUPLES + "{{ ns.x is filter }}", "list of more than"),
    "nested as text that is lower": (1, TUPLES + "{{ ns.x is lower }}", "list of more than"),
    "nested and counted": (1, TUPLES + "{{ [ns.x].count(1) }}", "list of more than"),
    "nested and sorted": (1, TUPLES + "{{ [ns.x, ns.x] | map('default') | sort }}", "list of more than"),
    "nested as text": (1, TUPLES + "{{ ns.x | string }}", "list of more than"),
    "nested and in a list": (1, TUPLES + "{{ ns.x in [ns.x] }}", "list of more than"),
    "keys without others": (1, TUPLES + "{{ {}.keys() - ([ns.x] | map('default')) }}", "no keys"),
    "keys that share nothing": (1, TUPLES + "{{ {}.keys().isdisjoint([ns.x] | map('default')) }}", "unsafe"),
    "a dict from keys": (1, TUPLES + "{{ {}.fromkeys([ns.x] | map('default')) }}", "unsafe"),
    "depth": (
        1,
        "{% set ns = namespace(x=1) %}{% for n in range(40000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
        "levels",
    ),
    "a search from behind": (1, SEARCH.format("rpartition(y)"), "compares"),
    "a split from behind": (1, SEARCH.format("rsplit(y)"), "compares"),
    "a split by name": (1, SEARCH.format("rsplit(sep=y)"), "compares"),
    "a place from behind": (1, SEARCH.format("rfind(y)"), "compares"),
    "a place that is not there": (1, SEARCH.format("rindex(y)"), "compares"),
    "a place by another way": (1, "{{ (('a' * 19999999) | attr('rfind'))('a' * 4999999 ~ 'b') }}", "compares"),
    "a strip": (1, "{{ ('a' * 9999999).strip('b' * 9999999 ~ 'a') }}", "compares"),
    "a trim": (1, "{{ ('a' * 9999999) | trim('b' * 9999999 ~ 'a') }}", "compares"),
    "a number of many digits": (1, "{{ ('f' * 9000000) | int(base=16) // 3 }}", "digits"),
    "a number of some digits": (1, "{{ ('f' * 90) | int(base=16) }}", "number without end"),
    "a number in the source": (2, "\n{{ 0x" + "f" * 40000 + " // 0x" + "e" * 20000 + " }}", "number without end"),
    "a rest": (1, "{{ 3 % (9999999999 * 9999999999) }}", "number without end"),
    "a difference": (1, "{{ 1e300 | int - 1 }}", "number without end"),
    "a sum of numbers": (1, "{{ ([2000000000000000000] * 9) | sum }}", "number without end"),
    "formatting by a test": (1, "{{ '%99999999999d' is odd }}{{ '%99999999999d' is divisibleby(3) }}", "no number"),
    "formatting by even in select": (1, "{{ ['%99999999999d'] | select('even') | list }}", "no number"),
    "digits of a fraction": (1, "{{ (1e-300).as_integer_ratio() }}", "unsafe"),
    "lists that are kept": (1, KEPT.format("[0] * 999999"), "GB of texts and lists"),
    "lists of numbers that are kept": (1, KEPT.format("range(99999) | list"), "GB of texts and lists"),
    "lists in the source that are kept": (1, KEPT.format("[" + "0, " * 9999 + "]"), "GB of texts and lists"),
    "wide texts that are kept": (1, KEPT.format("'\U0001f600' * 9000000"), "GB of texts and lists"),
    "halves of a text that are kept": (1, HALVES, "GB of texts and lists"),
    "tags": (1, "{{ (('<!--' * 999999) | escape).striptags() }}", "unsafe"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_ends_in_one_line_that_names_the_place(name, monkeypatch):
    line, source, reason = ENDLESS[name]
    monkeypatch.setattr(jinja_budget, "STEPS", 50_000)  # the same, sooner
    with pytest.raises(TemplateFault) as caught:
        chat_jinja.render(source, [], {}, generation_prompt=False)
    assert reason in caught.value.problem
    assert "\n" not in caught.value.what
    assert caught.value.line == line


@pytest.mark.parametrize("source", [KEPT.format("[0] * 999999"), HALVES])
def test_twin_what_is_made_is_what_stops_it(source, monkeypatch):
    """Else it is the time, after gigabytes."""
    monkeypatch.setattr(jinja_budget, "charge", lambda size: None)
    monkeypatch.setattr(jinja_limits, "charge", lambda size: None)
    monkeypatch.setattr(jinja_budget, "STEPS", 200)
    with pytest.raises(TemplateFault, match="steps"):
        chat_jinja.render(source, [], {}, generation_prompt=False)


def test_computing_time_is_the_last_net(monkeypatch):
    monkeypatch.setattr(jinja_budget, "SECONDS", 0.0)
    with pytest.raises(TemplateFault, match="computed for 0 seconds"):
        chat_jinja.render("{% for a in [1] %}{% endfor %}", [], {}, generation_prompt=False)


def test_one_rendering_leaves_the_next_its_budget(monkeypatch):
    monkeypatch.setattr(jinja_budget, "STEPS", 100)
    for _ in range(3):
        chat_jinja.render("{% for a in range(99) %}{% endfor %}", [], {}, generation_prompt=False)


def test_twin_the_guard_of_replace_is_what_stops_it(monkeypatch):
    monkeypatch.setattr(jinja_limits, "_GUARDS", {})
    monkeypatch.setattr(jinja_budget, "CHARACTERS", 1000)
    made = []
    monkeypatch.setattr(jinja_limits, "bounded", lambda value: made.append(len(str(value))) or value)
    chat_jinja._compile.cache_clear()
    source = "{% set x = ('x' * 60) | replace('x', 'y' * 60) %}"
    chat_jinja.render(source, [], {}, generation_prompt=False)
    assert max(made) > 1000
    monkeypatch.undo()


TWINS = {  # what protects, what it refuses, what comes without it
    "_looked_up": (lambda key: key, "{% set x = (1, (2, 3)) %}{{ {x: 'found'}[x] }}", "found"),
    "pay": (lambda *_: None, "{{ 'aab'.rfind('b') }}", "2"),
    "small": (lambda number: number, "{{ 9999999999 * 9999999999 }}", "99999999980000000001"),
    "_number": (lambda value: value, "{{ '%d' is even }}", "False"),
    "_checked_method": (lambda _, args, named: args, "{{ [(1, (2, 3))].count(1) }}", "0"),
    "_VIEWS": ((), "{{ ({'a': 1}.keys() - {}.keys()) | length }}", "1"),
    "_OFFERED": ((), "{{ 'a'.center(3) }}", " a "),
}


@pytest.mark.parametrize("name", TWINS)
def test_twin_each_check_is_what_refuses(name, monkeypatch):
    without, source, text = TWINS[name]
    monkeypatch.setattr(jinja_budget, "ITEMS", 2)
    monkeypatch.setattr(jinja_budget, "SEARCHED", 2)
    chat_jinja._compile.cache_clear()
    with pytest.raises(TemplateFault):
        chat_jinja.render(source, [], {}, generation_prompt=False)
    monkeypatch.setattr(jinja_limits, name, without)
    chat_jinja._compile.cache_clear()
    assert chat_jinja.render(source, [], {}, generation_prompt=False) == text
    chat_jinja._compile.cache_clear()


def test_a_long_conversation_is_far_from_the_limits(monkeypatch):
    turns = [Turn("user", "Go."), Turn("assistant", "word " * 1000)] * 500
    monkeypatch.setattr(jinja_budget, "STEPS", jinja_budget.STEPS // 10)
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
        "{{ 7 - 2 }}{{ 7 / 2 }}{{ 7 // 2 }}{{ -7 }}{{ 4 is even }}{{ 9 is divisibleby 3 }}",
        "{{ 'a' is lower }}{{ '12' | int }}{{ ' a ' | trim }}{{ 'ab'.rfind('b') }}{{ 2.0.is_integer() }}",
        "{{ ' a'.strip().rsplit('a', 1) }}{{ 'a</b>c'.split('</b>')[-1].rstrip('c') }}",
        "{% set x = 'a' %}{{ {x: {(1, 2): 3}}[x][(1, 2)] }}{{ messages[-1].get('role') }}{{ dict([(1, 2)]) }}",
        "{{ messages | map(attribute='role') | unique | list }}",
        "{{ messages | selectattr('role', 'in', ['user']) | list | length }}",
        "{% set y = namespace(x=[1]) %}{% for m in messages %}{% set y.x = y.x + [m.role] %}{% endfor %}{{ y.x }}",
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
    monkeypatch.setattr(jinja_budget, "step", lambda: None)
    source = "{% for a in range(1000) %}{% for b in range(100) %}{% endfor %}{% endfor %}done"
    monkeypatch.setattr(jinja_budget, "STEPS", 50_000)
    assert chat_jinja.render(source, [], {}, generation_prompt=False) == "done"
