"""Tokenizers with the layouts that the data layer has to cope with."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helpers.tiny_models import llama3_tokenizer
from surefoot.data.tokenize.segments import TextEncoder

LEGACY_TEXT = ["Give three tips for staying healthy.", "The answer is written here.", "### Instruction: ### Response:"]


@pytest.fixture(scope="session")
def llama3(tmp_path_factory) -> PreTrainedTokenizerFast:
    """Llama 3's layout: id 0 is "!", no PAD, BOS added by the post-processor."""
    return AutoTokenizer.from_pretrained(llama3_tokenizer(tmp_path_factory.mktemp("llama3")))


@pytest.fixture(scope="session")
def llama3_pad(tmp_path_factory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(llama3_tokenizer(tmp_path_factory.mktemp("pad"), pad=True))


@pytest.fixture(scope="session")
def legacy() -> PreTrainedTokenizerFast:
    """Llama 2's layout: blanks are ▁, one is put before every text, unknown bytes fall back."""
    learner = Tokenizer(models.BPE())
    text = [line.replace(" ", "▁") for line in LEGACY_TEXT]
    learner.train_from_iterator(text, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learnt = json.loads(learner.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    bpe = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ (bos_token if loop.first else '') + '[INST] ' + m.content"
        " + ' [/INST]' }}{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    )
    return tokenizer


@pytest.fixture(params=["llama3", "llama3_pad", "legacy"])
def any_encoder(request) -> TextEncoder:
    return TextEncoder(request.getfixturevalue(request.param))
