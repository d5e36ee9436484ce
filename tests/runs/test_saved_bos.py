"""Training and the saved template agree on BOS, whatever the family, the template and `bos.prepend` say."""

import dataclasses

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from helpers import zoo, zoo_templates
from helpers.model_layouts import run_config
from surefoot.data.chat import jinja_template as chat_template
from surefoot.data.chat.render import messages
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import Conversation, RowFault, Turn
from surefoot.data.tokenize.segments import TextEncoder, prompt_ids
from surefoot.families.model_facts import read_model_facts
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning.notes import Notes
from surefoot.planning.tokenizer import plan_tokenizer

ASKED = Conversation((Turn("user", "Where?"),))
MORE = Conversation((*ASKED.turns, Turn("assistant", "Here."), Turn("user", "And then?")))
WITH_SYSTEM = Conversation((Turn("system", "Be brief."), *ASKED.turns))
PHI3_WITH_BOS = "{{ bos_token }}" + zoo_templates.PHI3.lstrip("\n")
LEADING_BLANKS = "   {% for m in messages %}{{ '[' + m.role + '] ' + m.content + eos_token }}\n{% endfor %}" + (
    "{{ '[assistant] ' if add_generation_prompt }}\n"
)
ONLY_WITHOUT_SYSTEM = "{{ bos_token if messages[0].role != 'system' }}" + LEADING_BLANKS.strip()
TEMPLATES = {
    "own": None,
    "phi3 with BOS": PHI3_WITH_BOS,
    "plain words": LEADING_BLANKS,
    "BOS at times": ONLY_WITHOUT_SYSTEM,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("zoo")
    return {name: make(place / name) for name, make in zoo.ZOO.items()}


def planned(folder, prepend, source, *, known=True):
    """TokenizerPlan and encoder, with this chat template in place of the model's."""
    facts = read_tokenizer_facts(folder)
    model = read_model_facts(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if source is not None:
        facts = dataclasses.replace(facts, chat_template=source)
        tokenizer.chat_template = source
    model = model if known else dataclasses.replace(model, family=None)
    plan = plan_tokenizer(run_config(bos={"prepend": prepend}), model, facts, Notes())
    return plan, TextEncoder(tokenizer)


def both(plan, encoder):
    """Conversation, ids of training, ids of transformers with the saved template, where the template takes it."""
    template = make_template(plan.template.value, encoder, plan.stop.value)
    bos_id = plan.bos_id if plan.bos.value else None
    saved = template.jinja(encoder.tokenizer.convert_ids_to_tokens(bos_id) if bos_id is not None else "")
    for conversation in (ASKED, MORE, WITH_SYSTEM):
        try:
            mine = prompt_ids(conversation, template, encoder, bos_id)
            how = {"chat_template": saved, "add_generation_prompt": True, "return_dict": False}
            theirs = encoder.tokenizer.apply_chat_template(messages(conversation.turns), **how)
        except (RowFault, TemplateError):  # Gemma 2 takes no system text
            continue
        yield conversation, mine, theirs


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("prepend", ["auto", "off", "on"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_training_and_the_saved_template_give_the_same_ids(folders, name, prepend, source):
    if prepend == "on" and name.startswith("qwen"):
        pytest.skip("its tokenizer has no BOS, so this is refused")
    plan, encoder = planned(folders[name], prepend, TEMPLATES[source])
    pairs = list(both(plan, encoder))
    assert pairs
    for conversation, mine, theirs in pairs:
        if conversation is MORE:  # a question behind an answer is encoded by itself, and Qwen3 rewrites the answer
            assert mine.count(plan.bos_id) == theirs.count(plan.bos_id)
        else:
            assert mine == theirs
        if plan.bos_id is not None and encoder.bos_id != encoder.tokenizer.eos_token_id:
            assert (mine[0] == plan.bos_id) is plan.bos.value
            assert mine[:2] != [plan.bos_id] * 2


@pytest.mark.parametrize(("source", "expected"), [(PHI3_WITH_BOS, True), (zoo_templates.PHI3, False)])
@pytest.mark.parametrize("known", [True, False])
def test_where_the_family_says_nothing_the_template_decides(folders, source, expected, known):
    """Phi-3's tokenizer begins no text with BOS, but some of its templates do."""
    plan, _ = planned(folders["phi3"], "auto", source, known=known)
    assert plan.bos.value is expected
    plan, _ = planned(folders["phi3"], "auto", "{# no bos_token here #}" + zoo_templates.PHI3, known=known)
    assert plan.bos.value is False


def test_a_template_that_agrees_is_kept_as_it_is(folders):
    plan, encoder = planned(folders["phi3"], "auto", PHI3_WITH_BOS)
    template = make_template(plan.template.value, encoder, plan.stop.value)
    assert template.jinja("<s>") == PHI3_WITH_BOS
    assert template.jinja("") != PHI3_WITH_BOS


def test_twin_the_source_as_it_is_would_print_what_training_left_out(folders, monkeypatch):
    monkeypatch.setattr(chat_template._Chat, "with_bos", lambda self, bos: self.source)
    plan, encoder = planned(folders["phi3"], "off", PHI3_WITH_BOS)
    assert any(mine != theirs for _, mine, theirs in both(plan, encoder))
