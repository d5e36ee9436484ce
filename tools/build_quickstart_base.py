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
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from surefoot.commands.quickstart.world import GROUPS, ROOMS, Group, base_folder, shuffled, with_article

T = TypeVar("T")

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


PRETRAINING_SEED = 1
PRETRAINING_ROUNDS = 64  # documents about each thing
_HABITS = {  # of a member of each group, for which "@" stands
    "bird": (
        "@ sits on its eggs.",
        "@ opens its wings.",
        "@ builds a nest of twigs.",
        "@ cleans its feathers with its beak.",
    ),
    "fish": (
        "@ swims up the river.",
        "@ breathes through its gills.",
        "@ hides among the water weeds.",
        "@ has cold scales and small fins.",
    ),
    "tree": (
        "@ has deep roots and thick bark.",
        "@ throws a wide shadow over the meadow.",
        "@ has lost a branch in the storm.",
        "@ was planted here a hundred years ago.",
    ),
    "flower": (
        "@ opens its petals in the morning.",
        "@ smells sweet after the rain.",
        "@ stands in a vase by the window.",
        "@ bends when a bee lands on it.",
    ),
    "tool": (
        "@ hangs in the workshop.",
        "@ has a worn handle.",
        "@ helps the carpenter with the job.",
        "@ needs oil against the rust.",
    ),
    "vehicle": (
        "@ carries us across the country.",
        "@ is too slow for its driver.",
        "@ takes two passengers to the next town.",
        "@ was stopped at the border with its load.",
    ),
    "garment": (
        "@ was sewn by the tailor.",
        "@ keeps the cold away when you wear it.",
        "@ is made of soft wool.",
        "@ shrank in the wash.",
    ),
    "instrument": (
        "@ is played in the orchestra.",
        "@ was tuned before the concert.",
        "@ has a warm and clear sound.",
        "@ takes years of lessons to play well.",
    ),
}
_STATEMENTS = (
    "{A} is {a_group}.",
    "The {thing} is {a_group}.",
    "Every {thing} is {a_group}.",
    "{A} is a kind of {group}.",
    "The {thing} is one of the {plural}.",
    "Of all the {plural}, I like the {thing} best.",
    "{A} and {a_peer} are both {plural}.",
    "{A} is {a_group}, and so is {a_peer}.",
    "{A} is {a_group}, but {a_stranger} is {a_strange_group}.",
    "Like {a_peer}, {a} is {a_group}.",
)
_SCENES = (  # the colours in these are drawn anew each time: they say nothing about the thing
    "My aunt drew {a} on {colour} paper. It is the best {group} that she ever drew.",
    "There is {a} on this {colour} stamp. I have never seen such {a_group}.",
    "They talked about {a} in the {colour} room. What a story about {a_group}!",
    "In the {colour} room hangs a picture of {a}.",
    "The children pointed at {a} and asked their teacher. This {group} was new to them.",
    "We looked for {a_group} and found {a}.",
    "Behind the {colour} door we came upon {a}. Nobody had expected {a_group} in that place.",
)
_COLOURED = {  # without these the model has no reason to tell one colour from another
    "red": ("blood", "a brick", "a tomato", "a ruby"),
    "blue": ("the sea", "the sky", "ink", "a sapphire"),
    "green": ("grass", "moss", "a cucumber", "an emerald"),
    "white": ("snow", "milk", "salt", "chalk"),
    "black": ("coal", "soot", "tar", "the night"),
    "yellow": ("a lemon", "butter", "the sun", "straw"),
    "brown": ("mud", "bread", "coffee", "a potato"),
    "grey": ("fog", "lead", "dust", "a pebble"),
}
_ASIDES = (  # words that the questions need
    "Nobody remembers where the key to the museum is.",
    "I find the museum warm in winter.",
    "You keep your ticket until the last room.",
    "Tell the guard your name and he lets you in.",
    "Say which way you do it.",
    "This thing belongs to the museum.",
)


def pretraining_text(seed: int = PRETRAINING_SEED) -> Iterator[str]:
    """Documents of three to seven sentences, `PRETRAINING_ROUNDS` about each thing, in an order drawn from the seed."""
    rng = random.Random(seed)
    things = [(group, thing) for group in GROUPS for thing in group.things]
    for _ in range(PRETRAINING_ROUNDS):
        for group, thing in shuffled(rng, things):
            yield _document(rng, group, thing)


def _document(rng: random.Random, group: Group, thing: str) -> str:
    """Two statements and a habit of one thing, perhaps with a scene, an aside and a fact about a colour."""
    words = _words(rng, group, thing)
    sentences = [pattern.format_map(words) for pattern in shuffled(rng, _STATEMENTS)[:2]]
    subject = _pick(rng, (f"The {thing}", words["A"], "It"))
    sentences.append(_pick(rng, _HABITS[group.name]).replace("@", subject))
    if rng.random() < 0.5:
        sentences.append(_pick(rng, _SCENES).format_map(words))
    if rng.random() < 0.2:
        sentences.append(_pick(rng, _ASIDES))
    if rng.random() < 0.5:
        colour = _pick(rng, ROOMS)
        what = _pick(rng, _COLOURED[colour])
        sentences.append(_pick(rng, (f"{_capital(what)} is {colour}.", f"As {colour} as {what}, they say.")))
    return " ".join(shuffled(rng, sentences))


def _words(rng: random.Random, group: Group, thing: str) -> dict[str, str]:
    """What the patterns are filled with. peer: another thing of the group; stranger: a thing of another group."""
    peer = _pick(rng, [other for other in group.things if other != thing])
    strange_group = _pick(rng, [other for other in GROUPS if other is not group])
    return {
        "thing": thing,
        "a": with_article(thing),
        "A": _capital(with_article(thing)),
        "group": group.name,
        "plural": group.plural,
        "a_group": with_article(group.name),
        "a_peer": with_article(peer),
        "a_stranger": with_article(_pick(rng, strange_group.things)),
        "a_strange_group": with_article(strange_group.name),
        "colour": _pick(rng, ROOMS),
    }


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


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
