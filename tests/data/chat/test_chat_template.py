"""The tokenizer's own template gives the ids that transformers gives, with a mask that no text can move."""

from __future__ import annotations

import copy

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from helpers.faults import raises_fault
from helpers.tiny_models import LLAMA3_TEMPLATE
from surefoot.data.chat import jinja_template as chat_template
from surefoot.data.chat import render as chat_jinja
from surefoot.data.chat.jinja_template import make_chat_template
from surefoot.data.formats import Conversation, Turn
from surefoot.data.tokenize.encode import EncodeSettings, encode
from surefoot.data.tokenize.segments import TextEncoder, prompt_ids

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The newest answer opens with an empty thinking block, earlier ones lose it; a thinking part in the text is split off.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{% if '</think>' in m.content %}{{ '<think>\n' + m.content.split('</think>')[0].split('<think>')[-1].strip() }}"
    "{{ '\n</think>\n\n' + m.content.split('</think>')[1].strip() }}"
    "{% else %}{{ '<think>\n\n</think>\n\n' + m.content }}{% endif %}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END_ONCE = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")  # like Phi-3: EOS after the last turn
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONE = (("user", "Two and two?"), ("assistant", "Four."))
TWO = (("system", "Be brief."), *ONE, ("user", " And three?\n"), ("assistant", "  Five.\n"))
SPELLED = (("user", "What is <|eot_id|><|im_end|> for?"), ("assistant", "<|im_end|> ends a turn.<|im_start|>"))


def with_template(tokenizer: PreTrainedTokenizerFast, source: str) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = source
    return tokenizer


def conversation(pairs: tuple[tuple[str, str], ...]) -> Conversation:
    return Conversation(tuple(Turn(role, content) for role, content in pairs), 1, 1)


def encode_one(tokenizer: PreTrainedTokenizerFast, pairs, train_on="responses"):
    encoder = TextEncoder(tokenizer)
    template = make_chat_template(encoder, (tokenizer.eos_token_id,))
    bos = tokenizer.bos_token_id if "bos_token" in tokenizer.chat_template else None
    how = EncodeSettings(encoder=encoder, bos_id=bos, max_length=1000, train_on=train_on)
    (example,) = encode([conversation(pairs)], template, how, "d.json")
    return example, template, encoder, bos


def reference(tokenizer: PreTrainedTokenizerFast, pairs, prompt: bool) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in pairs]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)


def learned(tokenizer: PreTrainedTokenizerFast, example) -> list[str]:
    """The supervised stretches as text."""
    stretches: list[list[int]] = []
    for place in example.supervised.nonzero()[0]:
        if place == 0 or not example.supervised[place - 1]:
            stretches.append([])
        stretches[-1].append(int(example.ids[place]))
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize("source", [LLAMA3_TEMPLATE, CHATML, END_ONCE], ids=["llama3", "chatml", "end once"])
@pytest.mark.parametrize("pairs", [ONE, TWO], ids=["one turn", "two turns"])
def test_ids_are_those_of_transformers(llama3, source, pairs):
    tokenizer = with_template(llama3, source)
    example, template, encoder, bos = encode_one(tokenizer, pairs)
    assert example.ids.tolist() == reference(tokenizer, pairs, prompt=False)
    for answer in range(1 if len(pairs) == 2 else 2, len(pairs), 2):
        asked = prompt_ids(conversation(pairs[:answer]), template, encoder, bos)
        assert asked == reference(tokenizer, pairs[:answer], prompt=True)
        assert example.ids[: len(asked)].tolist() == asked  # generation sees what training saw
        assert not example.supervised[len(asked) - 1]
        assert example.supervised[len(asked)]


def test_the_answer_and_its_stop_token_are_learned_and_nothing_else(llama3):
    trimmed, kept = with_template(llama3, LLAMA3_TEMPLATE), with_template(llama3, CHATML)
    assert learned(trimmed, encode_one(trimmed, TWO)[0]) == ["Four.<|eot_id|>", "Five.<|eot_id|>"]
    assert learned(kept, encode_one(kept, TWO)[0]) == ["Four.<|im_end|>", "  Five.\n<|im_end|>"]
    assert learned(kept, encode_one(kept, TWO, train_on="last")[0]) == ["  Five.\n<|im_end|>"]
    whole = encode_one(trimmed, TWO, train_on="everything")[0]
    assert whole.supervised.tolist() == [False] + [True] * (len(whole.ids) - 1)


def test_the_stop_token_is_found_where_the_plan_does_not_know_it(llama3):
    tokenizer = with_template(llama3, END_ONCE)
    _, template, _, _ = encode_one(tokenizer, ONE)
    assert template.stop_ids == (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>"))


@pytest.mark.parametrize("source", [LLAMA3_TEMPLATE, CHATML], ids=["llama3", "chatml"])
def test_control_tokens_in_texts_stay_text(llama3, source):
    tokenizer = with_template(llama3, source)
    example, template, encoder, bos = encode_one(tokenizer, SPELLED)
    plain, _, _, _ = encode_one(tokenizer, ONE)
    control = [number for number in example.ids if number in encoder.control]
    assert control == [number for number in plain.ids if number in encoder.control]
    assert tokenizer.decode(example.ids) == tokenizer.decode(reference(tokenizer, SPELLED, prompt=False))
    assert example.control_texts == 4
    asked = prompt_ids(conversation(SPELLED[:1]), template, encoder, bos)
    assert example.ids[: len(asked)].tolist() == asked
    assert len(learned(tokenizer, example)) == 1


def test_a_control_token_that_arises_where_two_texts_meet_stays_text(llama3):
    tokenizer = with_template(llama3, CHATML.replace("+ m.content +", "+ '<|eot' + m.content +"))
    example, *_ = encode_one(tokenizer, (("user", "_id|>"), ("assistant", "a")))
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") not in example.ids
    assert "<|eot_id|>" in tokenizer.decode(example.ids)


def test_jinja_in_texts_is_text(llama3):
    tokenizer = with_template(llama3, CHATML)
    example, _, _, _ = encode_one(tokenizer, (("user", "{{ 7 * 7 }}{% if %}"), ("assistant", "{# a #}")))
    assert "{{ 7 * 7 }}{% if %}" in tokenizer.decode(example.ids)
    assert learned(tokenizer, example) == ["{# a #}<|im_end|>"]


def test_a_template_that_changes_earlier_turns_is_laid_out_turn_by_turn(llama3):
    tokenizer = with_template(llama3, THINKING)
    example, template, encoder, _ = encode_one(tokenizer, (*ONE, ("user", "And three?"), ("assistant", "Five.")))
    block = "<think>\n\n</think>\n\n"
    assert learned(tokenizer, example) == [f"{block}Four.<|im_end|>", f"{block}Five.<|im_end|>"]
    assert template.notes == ()
    assert len(template.dialogue_notes) == 1
    asked = prompt_ids(conversation((*ONE, ("user", "And three?"))), template, encoder, None)
    assert example.ids[: len(asked)].tolist() == asked
    single, _, _, _ = encode_one(tokenizer, ONE)
    assert single.ids.tolist() == reference(tokenizer, ONE, prompt=False)


def test_a_template_that_rewrites_texts_is_rendered_for_real(llama3):
    tokenizer = with_template(llama3, THINKING)
    pairs = (("user", "Two and two?"), ("assistant", "<think> easy </think>Four."))
    example, *_ = encode_one(tokenizer, pairs)
    assert example.ids.tolist() == reference(tokenizer, pairs, prompt=False)
    assert learned(tokenizer, example) == ["<think>\neasy\n</think>\n\nFour.<|im_end|>"]
    spelled, *_ = encode_one(tokenizer, (("user", "a <|eot_id|>"), ("assistant", "<think>b <|im_end|></think>c")))
    assert learned(tokenizer, spelled) == ["<think>\nb <|im_end|>\n</think>\n\nc<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") not in spelled.ids
    several, *_ = encode_one(tokenizer, (*pairs, ("user", "u"), ("assistant", "<think>b</think>c")))
    assert learned(tokenizer, several)[1] == "<think>\nb\n</think>\n\nc<|im_end|>"
    assert "Four.<|im_end|>\n<|im_start|>user\nu<|im_end|>" in tokenizer.decode(several.ids)


def test_a_refused_role_is_named_with_the_template_line(llama3):
    tokenizer = with_template(llama3, NO_SYSTEM.replace("{% for", "{# first line #}\n{% for"))
    with raises_fault("SF-DATA-ROW", "d.json:1", 1, 2, "System"):  # of the file, of the template, its own word
        encode_one(tokenizer, TWO)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for m in messages %}\n{{ m.content", ("line", 2)),
        ("\n{{ messages[0].no.such }}", ("line", 2)),
        ("{{ 1 / 0 }}", ("line", 1, "division")),
        ("{{ messages.append(1) }}", ("line", 1)),
        ("{{ ''.__class__.__mro__ }}", ("line", 1)),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", ("line", 1)),
        ("nothing of the turns", ("(user)",)),
        (CHATML.replace("m.content", "m.content + m.content"), ("(user)",)),
        (CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'"), ("prompt",)),
        (CHATML.replace("'<|im_end|>\n'", "'### End\n'"), ("End\\n'",)),
    ],
)
def test_templates_that_cannot_be_trained_with_are_refused_at_once(llama3, source, said):
    tokenizer = with_template(llama3, source)
    with raises_fault("SF-DATA-TEMPLATE", "data.template", "tokenizer", *said):
        make_chat_template(TextEncoder(tokenizer), (tokenizer.eos_token_id,))


def test_no_template_lists_the_others(llama3):
    tokenizer = with_template(llama3, "")
    tokenizer.chat_template = None
    with raises_fault("SF-DATA-TEMPLATE", "data.template"):
        make_chat_template(TextEncoder(tokenizer), (1,))


def test_the_date_is_a_constant(llama3, monkeypatch):
    tokenizer = with_template(llama3, CHATML.replace("{% for", "{{ strftime_now('%d %b %Y') }}{% for", 1))
    example, template, _, _ = encode_one(tokenizer, ONE)
    assert tokenizer.decode(example.ids).startswith("26 Jul 2024<|im_start|>user")
    assert "26 Jul 2024" in template.notes[0]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ tools is none }}{{ documents is none }}",
        "  {% set ns = namespace(n=0) %}\n  {% for m in messages %}\n{% set ns.n = 1 + ns.n %}\n{% endfor %}{{ ns.n }}",
        "{{ dict(a=1) | tojson(indent=2) }}{{ bos_token }}{{ add_generation_prompt }}{{ range(3) | list }}",
        "{% macro f(x) -%} [{{ x }}] {%- endmacro %}{{ f(messages[0]['role']) }}\n",
    ],
)
def test_the_sandbox_renders_like_transformers(llama3, source):
    tokenizer = with_template(llama3, source)
    turns = [Turn(role, content) for role, content in TWO]
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = {"bos_token": tokenizer.bos_token}
    assert chat_jinja.render(source, turns, tokens, generation_prompt=True) == expected


# --- the checks above have teeth -------------------------------------------------------------------------------------


def test_twin_without_the_rendering_check_misses_a_rewritten_text(llama3, monkeypatch):
    monkeypatch.setattr(chat_template, "contents_between", lambda pieces, texts, rendered: list(texts))
    tokenizer = with_template(llama3, THINKING)
    pairs = (("user", "Two and two?"), ("assistant", "<think> easy </think>Four."))
    assert encode_one(tokenizer, pairs)[0].ids.tolist() != reference(tokenizer, pairs, prompt=False)


def test_twin_with_the_real_clock_changes_ids(llama3, monkeypatch):
    source = "{{ strftime_now('%Y') }}"
    assert chat_jinja.render(source, [], {}, generation_prompt=True) == "2024"
    assert jinja2.Template(source, keep_trailing_newline=True).render(strftime_now=lambda form: "2031") != "2024"
