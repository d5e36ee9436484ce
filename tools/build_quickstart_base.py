"""Build the base model of the quickstart: tokenizer, weights and configuration, from text written by the repository.

    python tools/build_quickstart_base.py                    # into src/surefoot/commands/quickstart/base
    python tools/build_quickstart_base.py --output FOLDER    # somewhere else

Takes a few minutes on two CPU cores. Two builds on one machine give the same bytes: seeded, always two threads, fp32.
Another machine may round matrix products differently; its weights then differ in the last bits and on from there, and
the model is as good. A plain loop in one file: it trains from random weights, once, and checks what it needs.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from surefoot.commands.quickstart.world import GROUPS, base_folder, pretraining_text

THREADS = 2
SEED = 1
BATCH = 64  # documents per step
PEAK_LR = 3e-3
FINAL_LR = 6e-5
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.01
IGNORE = -100

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
HEADERS = ("<|system|>", "<|user|>", "<|assistant|>")  # never in the pretraining text
VOCABULARY = 2048  # at most; merging ends earlier, when every word of the text is one token
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, not ' ~ message['role']) }}"
    "{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose post-processor puts BOS before plain text, as Llama's does."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = [BOS, EOS, PAD, *HEADERS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(specials), initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(documents, trainer)
    bpe.add_special_tokens(specials)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=list(HEADERS),
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Four layers, 128 wide, grouped-query attention, tied embeddings: about a million parameters."""
    bos, eos, pad = (tokenizer.convert_tokens_to_ids(token) for token in (BOS, EOS, PAD))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    return model


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to FINAL_LR."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * (FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def batches(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """input_ids and labels [BATCH, longest]: BOS document EOS, padded on the right."""
    eos, pad = (tokenizer.convert_tokens_to_ids(token) for token in (EOS, PAD))
    for start in range(0, len(documents), BATCH):
        encoded = tokenizer(documents[start : start + BATCH])["input_ids"]
        rows = [torch.tensor([*ids, eos]) for ids in encoded]
        input_ids = pad_sequence(rows, batch_first=True, padding_value=pad)
        labels = pad_sequence(rows, batch_first=True, padding_value=IGNORE)
        yield input_ids, labels


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> None:
    """One pass over the documents."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98))
    steps = math.ceil(len(documents) / BATCH)
    started = time.perf_counter()
    model.train()
    for step, (input_ids, labels) in enumerate(batches(tokenizer, documents)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 32 == 0 or step == steps - 1:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {time.perf_counter() - started:.0f} s", flush=True)


@torch.no_grad()
def knowledge(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Share of all things that the model puts into the right group: "The heron is one of the" -> " birds"."""
    model.eval()
    words = [tokenizer.encode(f" {group.plural}", add_special_tokens=False) for group in GROUPS]
    if any(len(ids) != 1 for ids in words):
        raise ValueError("the plural of every group must be one token, or its first token does not decide")
    first_ids = [ids[0] for ids in words]
    right = 0
    for number, group in enumerate(GROUPS):
        prompts = tokenizer([f"The {thing} is one of the" for thing in group.things], return_tensors="pt", padding=True)
        last = prompts["attention_mask"].sum(1) - 1
        logits = model(**{name: prompts[name] for name in ("input_ids", "attention_mask")}).logits
        chosen = logits[torch.arange(len(last)), last][:, first_ids].argmax(-1)
        right += int((chosen == number).sum())
    return right / sum(len(group.things) for group in GROUPS)


def build(folder: Path, documents: list[str]) -> float:
    """Write the base into `folder`; return what share of the facts it knows."""
    torch.set_num_threads(THREADS)
    tokenizer = build_tokenizer(documents)
    tokenizer.save_pretrained(folder)  # before its use: a batch with padding changes what would be saved
    model = build_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {model.num_parameters()} parameters, {len(documents)} documents", flush=True)
    train(model, tokenizer, documents)
    model.save_pretrained(folder)
    return knowledge(model, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the base model of the quickstart.")
    parser.add_argument("--output", type=Path, default=base_folder())
    folder = parser.parse_args().output
    known = build(folder, list(pretraining_text()))
    print(f"knows the group of {known:.1%} of the things")
    for path in sorted(folder.iterdir()):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
