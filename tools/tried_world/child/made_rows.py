"""Rows in place of public data sets: a few dozen, with the columns that the real ones have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

COUNT = 24  # rows of each split
_BIRDS = ("heron", "trout", "otter", "finch", "badger", "crane", "newt")


def text(n: int) -> str:
    words = f"The {_BIRDS[n % 7]} number {n} sees {_BIRDS[(n + 3) % 7]} {n * 7 % 11} at the river."
    return " ".join([words] * (1 + n % 3))


def question(n: int) -> str:
    return f"Where does the {_BIRDS[n % 7]} number {n} live?"


def answer(n: int) -> str:
    return f"The {_BIRDS[n % 7]} lives at river {n * 5 % 13}."


def worse(n: int) -> str:
    return f"Nobody knows {n}."


def bit(n: int) -> int:
    return n % 2


def flag(n: int) -> bool:
    return n % 2 == 0


def number(n: int) -> int:
    return n


def share(n: int) -> float:
    return 0.5 + n % 5 / 10


def empty(_: int) -> str:
    return ""


def user(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": question(n)}]


def assistant(n: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer(n)}]


def assistant_worse(n: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": worse(n)}]


def messages(n: int) -> list[dict[str, str]]:
    return user(n) + assistant(n)


def turns(n: int) -> list[dict[str, str]]:
    return messages(n) + messages(n + 1)


def messages_worse(n: int) -> list[dict[str, str]]:
    return user(n) + assistant_worse(n)


def summed(n: int) -> str:
    return json.dumps({"summaries": {"abstractive_summaries": [[answer(n)]], "extractive_summaries": []}})


def said(n: int) -> list[dict[str, Any]]:
    return [{"turn id": 1, "user utterance": question(n), "system response": answer(n), "dialog history": ""}]


def shared(n: int) -> list[dict[str, str]]:
    """As ShareGPT."""
    return [{"from": "human", "value": question(n)}, {"from": "gpt", "value": answer(n)}]


def spoken(n: int) -> str:
    return f"\n\nHuman: {question(n)}\n\nAssistant: {answer(n)}"


def spoken_worse(n: int) -> str:
    return f"\n\nHuman: {question(n)}\n\nAssistant: {worse(n)}"


def guanaco(n: int) -> str:
    return f"### Human: {question(n)}### Assistant: {answer(n)}"


def alpaca(n: int) -> str:
    return f"Below is an instruction.\n\n### Instruction:\n{question(n)}\n\n### Response:\n{answer(n)}"


def llama(n: int) -> str:
    return f"<s>[INST] {question(n)} [/INST] {answer(n)} </s>"


def solved(n: int) -> str:
    return f"{n} and {n} make {2 * n}.\n#### {2 * n}"


def code(n: int) -> str:
    """Long enough for a few rows of 128 tokens."""
    lines = ["import pandas as pd", "import seaborn as sns", "from sklearn.svm import SVC", "import matplotlib"]
    lines += [f"{bird}_{place} = pd.read_csv('{bird}_{n}.csv')" for place in range(6) for bird in _BIRDS]
    return "\n".join(lines)


def explained(n: int) -> dict[str, list[Any]]:
    return {"a_id": [str(n)], "text": [text(n)], "score": [n], "text_urls": [[]]}


def words(n: int) -> list[str]:
    return text(n).split()


def texts(n: int) -> list[str]:
    return [text(n), answer(n)]


Column = Callable[[int], Any]
_INSTRUCTED: dict[str, Column] = {"instruction": question, "input": empty, "output": answer}

SCHEMAS: tuple[tuple[str, dict[str, Column], tuple[str, ...]], ...] = (
    (r"imdb|rotten_tomatoes", {"text": text, "label": bit}, ("train", "test", "validation", "unsupervised")),
    (
        r"ultrachat_200k",
        {"prompt": question, "prompt_id": text, "messages": turns},
        ("train_sft", "test_sft", "train_gen", "test_gen"),
    ),
    (
        r"trl-lib/ultrafeedback_binarized|hh-rlhf-helpful-base|lm-human-preferences",
        {"chosen": messages, "rejected": messages_worse, "score_chosen": share, "score_rejected": share},
        (),
    ),
    (
        r"orpo-dpo-mix",
        {"source": text, "chosen": messages, "rejected": messages_worse, "prompt": question, "question": question},
        ("train",),
    ),
    (
        r"distilabel-capybara-dpo",
        {
            "source": text,
            "prompt": question,
            "chosen": messages,
            "rejected": messages_worse,
            "rating_chosen": lambda n: 5.0,
            "rating_rejected": lambda n: 2.0,
        },
        ("train",),
    ),
    (
        r"dialogstudio",
        {"dialog index": number, "original dialog id": text, "original dialog info": summed, "log": said},
        ("train", "test", "validation"),
    ),
    (
        r"ultrafeedback.*(binarized|cleaned)|dpo-mix|orca_dpo_pairs.*chat",
        {
            "prompt": question,
            "prompt_id": text,
            "chosen": messages,
            "rejected": messages_worse,
            "messages": messages,
            "score_chosen": share,
            "score_rejected": share,
        },
        ("train", "train_prefs", "train_sft", "test_prefs", "test_sft", "train_gen", "test_gen", "test"),
    ),
    (
        r"trl-lib/capybara|smoltalk|everyday-conversations|openhermes.*messages|tulu|llm-human-friendly",
        {"messages": turns, "source": text, "num_turns": number},
        ("train", "test"),
    ),
    (
        r"no_robots|deita",
        {"messages": turns, "prompt": question, "prompt_id": text, "category": text, "source": text},
        ("train", "test", "train_sft", "test_sft"),
    ),
    (
        r"dpo-?en-?zh|comparison_gpt4",
        {
            "system": empty,
            "history": lambda n: [],
            "question": question,
            "response_chosen": answer,
            "response_rejected": worse,
        },
        (),
    ),
    (r"hh-rlhf", {"chosen": spoken, "rejected": spoken_worse}, ()),
    (r"shp\b", {"history": question, "human_ref_A": answer, "human_ref_B": worse, "labels": bit}, ()),
    (r"kto-mix", {"prompt": user, "completion": assistant, "label": flag}, ()),
    (r"ultrafeedback-prompt|ultrafeedback-gpt", {"prompt": user}, ()),
    (r"deepmath", {"prompt": user, "solution": solved}, ()),
    (r"trl-lib/tldr-preference", {"prompt": question, "chosen": answer, "rejected": worse}, ("train", "validation")),
    (r"trl-lib/tldr", {"prompt": question, "completion": answer}, ("train", "validation", "test")),
    (r"orca_dpo_pairs", {"system": text, "question": question, "chosen": answer, "rejected": worse}, ()),
    (r"stack-exchange-paired", {"qid": number, "question": question, "response_j": answer, "response_k": worse}, ()),
    (r"oasst1_en|oasst_top1|openassistant/oasst", {"messages": turns, "text": guanaco}, ()),
    (r"guanaco|openassistant", {"text": guanaco}, ()),
    (
        r"multilingual-thinking",
        {
            "reasoning_language": text,
            "developer": text,
            "user": question,
            "analysis": text,
            "final": answer,
            "messages": messages,
        },
        (),
    ),
    (r"dolly", {"instruction": question, "context": text, "response": answer, "category": text}, ()),
    (r"python_code_instructions|articles_constitution", {**_INSTRUCTED, "prompt": alpaca}, ()),
    (r"alpaca", {**_INSTRUCTED, "text": alpaca}, ()),
    (r"samsum|dialogsum", {"id": text, "dialogue": text, "summary": answer, "topic": question}, ()),
    (r"xsum", {"document": text, "summary": answer, "id": text}, ()),
    (r"cnn_dailymail", {"article": text, "highlights": answer, "id": text}, ()),
    (r"gsm8k", {"question": question, "answer": solved}, ()),
    (
        r"numinamath-tir|numinamath|openr1-math",
        {"problem": question, "solution": solved, "answer": solved, "messages": messages},
        (),
    ),
    (
        r"eli5_category",
        {"q_id": number, "title": question, "selftext": text, "category": text, "answers": explained},
        ("train", "validation1", "validation2", "test"),
    ),
    (
        r"wikitext|ptb|bookcorpus|openwebtext|eli5|tiny_shakespeare|minipile|pile|tinystories|\bc4\b|arxiv",
        {"text": text},
        ("train", "validation", "test"),
    ),
    (r"codeparrot", {"repo_name": text, "path": text, "content": code, "license": text}, ("train", "valid")),
    (r"yoda_sentences", {"sentence": question, "translation": answer, "translation_extra": text}, ("train",)),
    (r"english_quotes", {"quote": text, "author": question, "tags": words}, ("train",)),
    (r"awesome-chatgpt-prompts", {"act": question, "prompt": text}, ()),
    (r"twitter_complaints|raft", {"Tweet text": text, "ID": number, "Label": bit}, ()),
    (r"financial_phrasebank", {"sentence": text, "label": bit}, ()),
    (r"mlabonne/guanaco-llama2|guanaco-llama2", {"text": llama}, ()),
    (r"openhermes|slimorca|sharegpt|finetome", {"conversations": shared, "source": text, "id": text}, ()),
    (r"sql-create-context", {"question": question, "context": text, "answer": answer}, ()),
    (
        r"squad",
        {
            "id": text,
            "title": text,
            "context": text,
            "question": question,
            "answers": lambda n: {"text": ["river"], "answer_start": [3]},
        },
        (),
    ),
    (
        r"glue|mrpc|\bsst2?\b|\bcola\b",
        {"sentence1": text, "sentence2": question, "sentence": text, "label": bit, "idx": number},
        (),
    ),
    (r"conll|wnut", {"tokens": words, "ner_tags": lambda n: [0 for _ in words(n)]}, ()),
    (r"metamathqa", {"query": question, "response": answer, "type": text, "original_question": question}, ()),
    (r"databricks|instruction", {"instruction": question, "context": text, "response": answer}, ()),
    (
        r"opus|kde4|wmt",
        {"id": text, "translation": lambda n: {"en": question(n), "fr": answer(n), "de": answer(n)}},
        (),
    ),
)
"""Pattern of the id (lower case), its columns, its splits ("train", "test" and "validation" where none are named)."""

_NAMED: dict[str, Column] = {
    "messages": messages, "conversations": shared, "conversation": messages, "label": bit, "labels": bit,
    "input": empty, "output": answer, "response": answer, "answer": answer, "completion": answer, "chosen": answer,
    "rejected": worse, "question": question, "prompt": question, "instruction": question, "query": question,
    "idx": number, "id": number, "summary": answer, "history": lambda n: [], "system": empty, "context": text,
    "solution": solved, "score_chosen": share, "score_rejected": share, "tokens": words, "tags": words,
}  # fmt: skip
_COLUMN = re.compile(
    r"""[\w\])]\[["']([A-Za-z][\w ]*)["']\]|text_field["']?\s*[=:]\s*["'](\w+)["']|\.get\(["']([A-Za-z]\w*)["']"""
)
_REMOVED = re.compile(r"remove_columns=\[([^\]]*)\]")
_TOKENS = {"input_ids", "attention_mask", "labels", "train", "test", "validation", "token_type_ids", "text_field",
           "role", "content", "from", "value", "position_ids", "train_sft", "test_sft"}  # fmt: skip


def schema(name: str, script: str) -> tuple[dict[str, Column], tuple[str, ...], bool]:
    """Return the columns and splits of a data set, and whether they are the real one's: those of others are the columns
    that the script reads."""
    for pattern, columns, splits in SCHEMAS:
        if re.search(pattern, name.lower()):
            return columns, splits or ("train", "test", "validation"), True
    spoken = re.search(r"""["'](role|from)["']""", script)
    taken = _TOKENS - (set() if spoken else {"content"})  # of a text, or of a turn
    found = [one for groups in _COLUMN.findall(script) for one in groups if one and one not in taken]
    found += [one for names in _REMOVED.findall(script) for one in re.findall(r"""["']([\w ]+)["']""", names)]
    columns = {one: _NAMED.get(one.lower(), text) for one in found}
    return columns or {"text": text, **_INSTRUCTED}, ("train", "test", "validation"), False


def columns_of_file(name: str, script: str) -> dict[str, Column]:
    """Return the columns of a file of rows that is not there: also those that a format string may read."""
    columns, _, known = schema(name, script)
    return columns if known else {**_INSTRUCTED, **columns}


def rows(columns: Mapping[str, Column], count: int = COUNT) -> Iterable[dict[str, Any]]:
    return ({name: make(n) for name, make in columns.items()} for n in range(count))
