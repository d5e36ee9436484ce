"""Each method and each loss has all of its parts, and nobody else asks for their names."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import get_args

import pytest

from helpers.doc_pages import ROOT
from surefoot.config.method_contradictions import losses
from surefoot.config.methods import AlignmentConfig, RewardConfig
from surefoot.config.schema import FunctionsConfig, RunConfig
from surefoot.method_facts.losses import PAIR_LOSSES, REWARD_LOSSES, LossFacts, joined, keys_of, read_by
from surefoot.method_facts.methods import COUNTED, FORMATS, METHODS, SECTIONS, MethodFacts, Records
from surefoot.methods.losses.preference import LOSSES, Constants
from surefoot.methods.losses.reward import LOSSES as OF_REWARD_MODELS
from surefoot.methods.method import MethodFunctions
from surefoot.methods.table import FUNCTIONS, functions_of

SRC = ROOT / "src" / "surefoot"
NAMES = frozenset({*METHODS, *PAIR_LOSSES, *REWARD_LOSSES})
HOMES = ("methods/", "method_facts/")
OTHER_TOOLS = "interop/"  # whose own words for stages and losses are translated there
# The same letters with another meaning: (file, word) -> what it is there.
OTHER_MEANINGS = {
    ("commands/evaluate.py", "reward"): "a subcommand",
    ("commands/evaluate_answers.py", "reward"): "an argument of surefoot.train",
    ("runs/custom.py", "reward"): "an argument of surefoot.train",
    ("config/resume_policy.py", "sft"): "a section of the config",
    ("config/resume_policy.py", "reward"): "a section of the config",
    ("config/resume_policy.py", "ppo"): "a section of the config",
    ("config/resume_policy.py", "grpo"): "a section of the config",
    ("config/resume_policy.py", "distill"): "a section of the config",
    ("commands/init.py", "sft"): "a section of the config",
    ("commands/init.py", "reward"): "a section of the config",
    ("commands/init.py", "ppo"): "a section of the config",
    ("commands/init.py", "grpo"): "a section of the config",
    ("commands/init.py", "distill"): "a section of the config",
    ("data/tokenize/segments.py", "last"): "a value of data.train_on",
    ("data/tokenize/whole.py", "last"): "a value of data.train_on",
    ("commands/board/listing.py", "reward"): "a key of a logged row",
    ("report/results.py", "last"): "a key of the results",
    ("report/results.py", "reward"): "a key of a logged row",
    ("report/views.py", "reward"): "a column of a table",
    ("report/wording.py", "reward"): "a key of an evaluation's figures",
    ("runs/identity.py", "reward"): "a part of the recorded identity",
}


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and word of every name of a method or loss that is compared, looked up or matched, or keys a table."""
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        match node:
            case ast.Compare():
                asked = [node.left, *node.comparators]
            case ast.Dict():
                asked = [key for key in node.keys if isinstance(key, ast.Constant)]
            case ast.MatchValue():
                asked = [node.value]
            case ast.Call(func=ast.Attribute(attr="Choice")):
                asked = list(node.args)
        for one in asked:
            for word in ast.walk(one):
                if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value in NAMES:
                    yield word.lineno, word.value


def test_nobody_else_asks_for_the_name_of_a_method_or_loss():
    found, used = [], set()
    for file in sorted(SRC.rglob("*.py")):
        path = file.relative_to(SRC).as_posix()
        if path.startswith((*HOMES, OTHER_TOOLS)):
            continue
        for line, word in compared(ast.parse(file.read_text(encoding="utf-8"))):
            used.add((path, word))
            if (path, word) not in OTHER_MEANINGS:
                found.append(f"{path}:{line}: {word}")
    assert not found, "\n".join(("ask surefoot.method_facts, or say here what else the word means:", *found))
    assert not OTHER_MEANINGS.keys() - used, "these are there no more"


@pytest.mark.parametrize(
    "source",
    [
        'if config.stage == "dpo": pass',
        'packs = stage in ("sft", "pretrain")',
        'ROWS = {"reward": 2, "kto": 2}',
        'match loss:\n    case "orpo": pass',
        'if "simpo" != loss: pass',
        'if loss not in {"cpo"}: pass',
    ],
)
def test_twin_a_planted_comparison_is_found(source):
    assert list(compared(ast.parse(source)))
    assert not list(compared(ast.parse("if config.method.packs: pass")))


def test_the_config_takes_the_names_of_the_rows():
    assert get_args(RunConfig.model_fields["stage"].annotation) == tuple(METHODS)
    for section, rows in ((AlignmentConfig, PAIR_LOSSES), (RewardConfig, REWARD_LOSSES)):
        named, _ = get_args(section.model_fields["loss"].annotation)  # or a function of the user's
        assert get_args(named) == tuple(rows)


def test_every_row_has_its_functions_and_every_section_its_keys():
    assert FUNCTIONS.keys() == METHODS.keys()
    assert {name: type(functions_of(name)) for name in METHODS} == dict.fromkeys(METHODS, MethodFunctions)
    assert LOSSES.keys() == PAIR_LOSSES.keys()
    assert {*keys_of(PAIR_LOSSES), "beta"} == {field.name for field in fields(Constants)}
    assert OF_REWARD_MODELS.keys() == REWARD_LOSSES.keys()
    for section in SECTIONS:
        keys = type(RunConfig.model_fields[section].default).model_fields
        owners = [one for one in METHODS.values() if one.section == section]
        read = {
            key for one in owners for key in (*one.own_keys, *(k for loss in one.losses.values() for k in loss.keys))
        }
        assert read <= keys.keys()


def test_every_kind_of_records_has_a_word_for_what_is_counted():
    assert {*COUNTED} == {*get_args(Records)}


@pytest.mark.parametrize("half", ["facts", "functions"])
def test_a_half_of_a_loss_cannot_be_imported(half):
    facts, functions = dict(PAIR_LOSSES), dict(LOSSES)
    tables = ("of.FACTS", "of.FUNCTIONS")
    assert joined(facts, functions, tables).keys() == facts.keys()  # twin
    del (functions if half == "facts" else facts)["cpo"]
    there, missing = tables if half == "facts" else tables[::-1]
    with pytest.raises(RuntimeError, match=rf"cpo.*{there}.*{missing}"):
        joined(facts, functions, tables)


def test_every_loss_method_and_format_has_its_place_in_the_documents():
    stage = " ".join((RunConfig.model_fields["stage"].description or "").split())
    assert {name for name in METHODS if not re.search(rf"(?:^|\. |\? ){name}: ", stage)} == set()
    formats = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert {name for name in FORMATS if not re.search(rf"^\| `{name}`", formats, re.M)} == set()
    page = (ROOT / "docs" / "preference.md").read_text(encoding="utf-8")
    assert {name for name in PAIR_LOSSES if not re.search(rf"^\| `{name}`", page, re.M)} == set()
    reward = (ROOT / "docs" / "reward.md").read_text(encoding="utf-8")
    assert {name for name in REWARD_LOSSES if f"`{name}`" not in reward and f"loss: {name}" not in reward} == set()


def test_a_key_of_some_losses_names_them():
    losses = {"a": LossFacts(reference=True, keys=("margin",)), "b": LossFacts(reference=False)}
    assert read_by("margin", losses) == ("a",)
    assert read_by("beta", losses) == ()


@pytest.mark.parametrize("unread", [("beta",), ()])
def test_a_key_that_the_chosen_loss_does_not_read_is_refused(unread):
    row = replace(PAIR_LOSSES["hinge"], unread=unread)
    config = SimpleNamespace(
        method=METHODS["dpo"], loss=row, alignment=AlignmentConfig(loss="hinge", beta=0.5), functions=FunctionsConfig()
    )
    assert [one.key for one in losses(config)] == [f"alignment.{key}" for key in unread]  # pyright: ignore[reportArgumentType]


def in_words(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def text_of(section: str) -> dict[str, str]:
    """Key -> the text under it, which `surefoot explain` and the schema show."""
    fields = type(RunConfig.model_fields[section].default).model_fields
    return {key: " ".join((field.description or "").split()) for key, field in fields.items()}


def unlike_rows(said: dict[str, str], methods: Mapping[str, MethodFacts]) -> dict[str, tuple[object, str]]:
    """Keys whose text names other methods or losses than the rows of the methods that read the section, or in another
    order -> (what the text has to hold, the text)."""
    found: dict[str, tuple[object, str]] = {}
    for name, method in methods.items():
        for key, text in said.items():
            readers = read_by(key, method.losses) or ((name,) if key in method.own_keys else ())
            only = in_words(readers) if readers else ""
            if only and not re.match(rf"{only} only[.:] ", text):
                found[key] = f"{only} only: ...", text
        if method.losses and re.findall(r"(?:^|\. )([\w+-]+): ", said["loss"]) != [*method.losses]:
            found["loss"] = [f"{loss}: ..." for loss in method.losses], said["loss"]
        if method.reference and method.losses and not method.rollouts:  # where a key of its own asks for one
            free = [loss for loss, row in method.losses.items() if not row.reference]
            for key, wanted in (("loss", f"Without a reference: {in_words(free)}."), ("sft", at_one(method.losses))):
                if wanted not in said[key]:
                    found[key] = wanted, said[key]
            free = [loss for loss in free if "beta" not in method.losses[loss].unread]
            if re.findall(r"([\w-]+)(?=[\w, -]*: )", said["beta"]) != free:
                found["beta"] = [f"{loss}: ..." for loss in free], said["beta"]
    return found


def at_one(losses: Mapping[str, LossFacts], quote: str = "") -> str:
    (weight,) = {row.sft for row in losses.values() if row.sft}
    names = in_words([f"{quote}{name}{quote}" for name, row in losses.items() if row.sft])
    return f"t {weight:g} by definition: {names}"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_texts_of_keys_name_the_losses_of_the_rows(section):
    readers = {name: one for name, one in METHODS.items() if one.section == section}
    assert unlike_rows(text_of(section), readers) == {}


def test_a_loss_may_have_a_hyphen_in_its_name():
    def named(text):
        return text.replace("orpo", "odds-ratio")

    losses = {named(name): row for name, row in METHODS["dpo"].losses.items()}
    said = {key: named(text) for key, text in text_of("alignment").items()}
    assert unlike_rows(said, {"dpo": replace(METHODS["dpo"], losses=losses)}) == {}


def test_twins_a_row_that_changes_makes_the_texts_untrue():
    said, dpo = text_of("alignment"), METHODS["dpo"]
    for keys, change in [
        ({"label_smoothing"}, {"ipo": replace(PAIR_LOSSES["ipo"], keys=("label_smoothing",))}),
        ({"loss", "beta"}, {"orpo": replace(PAIR_LOSSES["orpo"], reference=True)}),
        ({"sft"}, {"simpo": replace(PAIR_LOSSES["simpo"], sft=1.0)}),
        ({"loss"}, {"slic": LossFacts(reference=True)}),
        ({"loss", "beta"}, {"slic": LossFacts(reference=False)}),
    ]:
        assert unlike_rows(said, {"dpo": replace(dpo, losses={**PAIR_LOSSES, **change})}).keys() == keys
    in_another_order = dict(reversed(PAIR_LOSSES.items()))
    assert "loss" in unlike_rows(said, {"dpo": replace(dpo, losses=in_another_order)})
    assert unlike_rows(said, {"dpo": replace(dpo, own_keys=("good",))}).keys() == {"good"}


def test_the_readme_names_the_losses_of_the_rows():
    """Behind DPO, which is `sigmoid`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"\[DPO \(([^)]+)\)[^\]]*\]\(docs/preference\.md\)", readme)
    names, more = named.lower().removesuffix(" more").split(" and ")
    first = ["sigmoid", *names.split(", ")]
    assert first == [*PAIR_LOSSES][: len(first)]
    assert ["eight", "nine", "ten"].index(more) + 8 == len(PAIR_LOSSES) - len(first)


def test_the_page_names_the_losses_of_the_rows():
    page = (ROOT / "docs" / "preference.md").read_text(encoding="utf-8")
    assert at_one(PAIR_LOSSES, "`") in page
    rows = re.findall(r"^\| (`[^|]+`) with `(\w+):", page, re.M)
    assert rows
    assert {key: " or ".join(f"`{name}`" for name in read_by(key, PAIR_LOSSES)) for _, key in rows} == {
        key: names for names, key in rows
    }
