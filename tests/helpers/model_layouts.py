"""Model folders with the layout of real ones, in JSON only: enough to plan, written in a millisecond, no torch.

Vocabularies are short, but ids and special tokens are in the order of the real files.
"""

import json
from pathlib import Path
from typing import Any

from surefoot.config.schema import RunConfig
from surefoot.families.model_facts import ModelFacts, ModuleTree, read_model_facts
from surefoot.families.tokenizer_facts import TokenizerFacts, read_tokenizer_facts

LLAMA31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
}
LLAMA32_1B = LLAMA31_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LLAMA2_7B = LLAMA31_8B | {
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
# As transformers shows a model whose structure no row has.
SMALL_TREE = ModuleTree(
    config={
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
    },
    modules=(),
    embedding="model.embed_tokens",
    head="lm_head",
)
LLAMA3_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|eot_id|>{% endfor %}"
)
_LLAMA3_SPECIALS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
]


def tokenizer_files(
    folder: Path,
    ordinary: list[str],
    specials: list[str],
    *,
    roles: dict[str, str],
    first_special: int | None = None,
    chat_template: str | None = None,
    bos_by_processor: bool = False,
    stops: list[int] | None = None,
) -> Path:
    """Write tokenizer files. roles: such as {"bos_token": "<s>"}. first_special: id of the first special token."""
    folder.mkdir(parents=True, exist_ok=True)
    start = len(ordinary) if first_special is None else first_special
    after = len(specials) if first_special == 0 else 0  # Llama 2: specials in front
    added = [{"id": start + n, "content": text, "special": True} for n, text in enumerate(specials)]
    first = [{"SpecialToken": {"id": roles["bos_token"], "type_id": 0}}] if bos_by_processor else []
    processor = {"type": "TemplateProcessing", "single": [*first, {"Sequence": {"id": "A", "type_id": 0}}]}
    vocabulary = {text: after + n for n, text in enumerate(ordinary)}
    stored = {
        "added_tokens": added,
        "model": {"type": "BPE", "vocab": vocabulary},
        "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, processor]},
    }
    config: dict[str, Any] = dict(roles)
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if stops is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
    return folder


def llama3_tokenizer(folder: Path, *, ordinary: int = 128_000, pad: bool = False, chat: bool = False) -> Path:
    """Llama 3's tokenizer: id 0 is "!", special tokens last. pad: with 3.1's reserved pad. chat: as in Instruct."""
    words = ["!", *(f"w{number}" for number in range(1, ordinary))]
    specials = list(_LLAMA3_SPECIALS)
    if pad:
        specials.insert(4, "<|finetune_right_pad_id|>")
    filler = 256 - len(specials)  # 128 256 rows in all, as in the real file
    specials += [f"<|reserved_special_token_{number}|>" for number in range(2, 2 + filler)]
    eos = "<|eot_id|>" if chat else "<|end_of_text|>"
    return tokenizer_files(
        folder,
        words,
        specials,
        roles={"bos_token": "<|begin_of_text|>", "eos_token": eos},
        chat_template=LLAMA3_CHAT if chat else None,
        bos_by_processor=True,
    )


def llama2_tokenizer(folder: Path) -> Path:
    """Write Llama 2's tokenizer: <unk>, <s>, </s> first; no pad token."""
    words = [f"w{number}" for number in range(3, 32000)]
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer_files(folder, words, ["<unk>", "<s>", "</s>"], roles=roles, first_special=0, bos_by_processor=True)


def model_facts(folder: Path, config: dict[str, Any]) -> ModelFacts:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_model_facts(folder)


def small_tokenizer(folder: Path, **changes: Any) -> TokenizerFacts:
    """Write a tokenizer with ten ordinary tokens, then <s> and </s>. changes: arguments of `tokenizer_files`."""
    arguments: dict[str, Any] = {
        "ordinary": ["!", *"abcdefghi"],
        "specials": ["<s>", "</s>"],
        "roles": {"bos_token": "<s>", "eos_token": "</s>"},
    }
    return read_tokenizer_facts(tokenizer_files(folder, **(arguments | changes)))


def run_config(**sections: Any) -> RunConfig:
    """Return the config of a LoRA run with defaults, changed by `sections`; adapter=None: full fine-tuning."""
    base: dict[str, Any] = {
        "stage": "sft",
        "model": "unused",
        "data": {"train": "unused.jsonl"},
        "output": "unused",
        "adapter": {"kind": "lora", "rank": 16},
    }
    return RunConfig.model_validate(base | sections)
