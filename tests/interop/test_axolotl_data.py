"""Axolotl's streams of texts, data sets of token ids, and templates of one family."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from interop.axolotl_configs import CHAT, axolotl, refused
from interop.small_configs import BASES, outcome
from surefoot.data.batching.order import part_of
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file
from surefoot.interop.translation import Translation

STREAM: dict[str, Any] = {
    "pretraining_dataset": [{"path": "allenai/c4", "name": "en", "type": "pretrain", "text_column": "body"}],
    "datasets": None, "max_steps": 200, "sequence_len": 2048, "micro_batch_size": 2, "gradient_accumulation_steps": 4,
    "sample_packing": True,
}  # fmt: skip


def test_a_stream_is_as_many_texts_as_the_steps_need() -> None:
    found = axolotl(**STREAM)
    assert found.config["stage"] == "pretrain"
    tokens = 200 * 4 * 2 * 2048
    assert found.config["data"]["train"] == {
        "path": "allenai/c4", "subset": "en", "format": "text", "columns": {"text": "body"}, "streaming": True,
        "max_samples": tokens // 64,
    }  # fmt: skip
    # `encode_packed_streaming` fills one row of micro_batch_size x sequence_len tokens for a pass, with any attention.
    assert found.config["batch"] == {"size": 4, "row_tokens": 4096}
    assert outcome(found, "pretraining_dataset") == "changed"
    ordinary = axolotl(sample_packing=True, sequence_len=2048, micro_batch_size=2, gradient_accumulation_steps=4)
    assert ordinary.config["batch"] == {"size": 8, "row_tokens": 2048}


def test_a_file_of_texts_is_read_whole() -> None:
    assert axolotl(**(STREAM | {"pretraining_dataset": "texts.jsonl"})).config["data"]["train"] == {
        "path": "texts.jsonl", "format": "text"}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"max_steps": None}, "max_steps"),
        ({"datasets": CHAT["datasets"]}, "pretraining_dataset"),
        ({"pretraining_dataset": [{"path": "d", "type": "ebft_pretrain.transform"}]}, "pretraining_dataset"),
        ({"pretrain_multipack_attn": False}, "pretrain_multipack_attn"),
        ({"pretraining_sample_concatenation": True}, "pretraining_sample_concatenation"),
    ],
)
def test_streams_of_another_kind_are_refused(more: dict[str, Any], name: str) -> None:
    assert refused(**(STREAM | more)) == {name}


def test_a_streamed_set_of_answers_is_read_whole() -> None:
    found = axolotl(streaming=True, max_steps=10)
    assert (outcome(found, "streaming"), "streaming" in str(found.config)) == ("changed", False)


def test_token_ids_are_taken_as_they_are() -> None:
    found = axolotl(datasets=[{"path": "org/tokens", "type": None}])
    assert (found.config["stage"], found.config["data"]["train"]["format"]) == ("sft", "tokens")
    assert refused(datasets=[{"path": "a", "type": None}, {"path": "b", "type": "alpaca"}]) == {"datasets"}


@pytest.mark.parametrize(
    ("template", "base", "other"),
    [
        ("qwen3", "katanemo/Plano-Orchestrator-4B", "meta-llama/Llama-3.1-8B"),
        ("cohere", "CohereForAI/c4ai-command-r7b-12-2024", "Qwen/Qwen3-8B"),
        ("deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-8B"),
        ("jamba", "ai21labs/Jamba-v0.1", "Qwen/Qwen3-8B"),
    ],
)
def test_templates_of_one_family_are_its_models_own(template: str, base: str, other: str) -> None:
    found = axolotl(**CHAT, chat_template=template, base_model=base)
    assert (found.config["data"]["template"], outcome(found, "chat_template")) == ("tokenizer", "changed")
    assert refused(**CHAT, chat_template=template, base_model=other) == {"datasets"}


def numbers(text: str) -> Translation:
    base = BASES["axolotl"][1] | {"datasets": "DATA"}
    body = "".join(f"{name}: {value}\n" for name, value in base.items() if name != "datasets")
    return translate_file("a.yaml", f"{body}datasets: [{{path: d.jsonl, type: alpaca}}]\n{text}\n", [], Options())


def test_a_number_may_have_underscores() -> None:
    """As in YAML 1.1, which Axolotl reads."""
    assert numbers("sequence_len: 500_000").config["data"]["max_length"] == 500_000
    assert numbers("sequence_len: 500").config["data"]["max_length"] == 500


BOTH = {"min_length": 40, "unique": True}


@pytest.mark.parametrize(
    ("more", "expected", "outcomes"),
    [
        ({}, BOTH, ("carried", "carried")),
        ({"test_datasets": [{"path": "d.json", "type": "alpaca"}]}, BOTH, ("changed", "changed")),
        ({"skip_prepare_dataset": True}, {}, ("listed", "listed")),
        (
            {"rl": "dpo", "datasets": [{"path": "d.json", "type": "chatml.intel"}]},
            {"unique": True},
            ("listed", "carried"),
        ),
    ],
)
def test_examples_are_left_out_where_axolotl_leaves_them_out(
    more: dict[str, Any], expected: dict[str, Any], outcomes: tuple[str, str]
) -> None:
    """`handle_long_seq_in_dataset` and `deduplicate_and_log_datasets`; tests/data/test_prepare.py compares examples."""
    names = ("min_sample_len", "dataset_exact_deduplication")
    found = axolotl(**(dict(zip(names, (40, True), strict=True)) | more))
    data = found.config["data"]
    assert {name: data[name] for name in ("min_length", "unique") if name in data} == expected
    assert tuple(outcome(found, name) for name in names) == outcomes


@pytest.mark.parametrize(("shards", "place"), [(10, None), (4, 1), (3, 2)])
def test_shards_are_as_many_of_the_shuffled_records(shards: int, place: int | None) -> None:
    """`dataset.shuffle(seed).shard(num_shards, index)`, by default the first (utils/data/sft.py)."""
    entry = CHAT["datasets"][0] | {"shards": shards} | ({} if place is None else {"shards_idx": place})
    found = axolotl(datasets=[entry])
    share = found.config["data"]["train"]["share"]
    assert {note.outcome for note in found.notes if ".shards" in note.word} == {"changed"}
    theirs = [shard(count, shards, place or 0) for count in COUNTS]
    ours = [part_of(count, share["of"], share["take"], 1) for count in COUNTS]
    assert all(abs(len(one) - len(other)) <= 1 for one, other in zip(ours, theirs, strict=True))
    assert all(list(one) != list(range(one[0], one[0] + len(one))) for one in ours)  # of a shuffle
    others = [part_of(count, share["of"], at, 1) for count in COUNTS for at in range(1, 1 + len(share["of"]))]
    assert {len(one) for one in others} - {len(one) for one in ours}  # the twin: another part is of another size


COUNTS = (100, 101, 109)


def shard(count: int, shards: int, index: int) -> list[int]:
    """Dataset.shuffle and Dataset.shard of datasets 4."""
    size, more = divmod(count, shards)
    start = size * index + min(index, more)
    return list(np.random.default_rng(1).permutation(count)[start : start + size + (index < more)])


def test_shards_of_nothing_and_of_a_part_are_refused() -> None:
    entry = CHAT["datasets"][0]
    assert refused(datasets=[entry | {"shards": 4, "shards_idx": 4}]) == {"datasets"}
    assert refused(datasets=[entry | {"shards": 4, "split": "train[:10]"}]) == {"datasets"}
    whole = axolotl(datasets=[entry | {"shards": 1}]).config["data"]["train"]
    assert whole == {"path": "d.jsonl", "format": "messages"}
