"""Small tokenizers with the layout of real ones: ids of special tokens, who adds BOS, which token pads.

`byte_level` is the kind of Llama 3, Qwen, OPT and GPT-2; `sentencepiece` that of Llama 2, Mistral, Phi-3 and Gemma.
Vocabularies are short: the alphabet and what a few sentences yield. Everything else is as in the published files,
including `tokenizer_class`, so that AutoTokenizer takes the same path as for a real model.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "Give three tips for staying healthy. Below is an instruction that describes a task.",
    "### Instruction: ### Input: ### Response: The answer to the question is written here.",
    "A heron is a bird and a trout is a fish; what is the colour of the sky?",
    "system user assistant tool model You are a helpful assistant. You may call one or more functions to assist with",
    'the user query. {"type": "function", "name": "weather", "parameters": {"city": "Bonn"}}',
    "Cutting Knowledge Date: December 2023 Today Date: 26 Jul 2024 Environment: ipython",
)
_SPLIT_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_LLAMA3 = _SPLIT_QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def byte_level(*, first: Sequence[str] = (), split: str | None = None, vocab_size: int = 400) -> Tokenizer:
    """BPE over bytes; id 0 is "!" unless `first` has tokens. split: pattern of the pre-tokenizer; None: GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE())
    if split is None:
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        pieces = pre_tokenizers.Split(Regex(split), behavior="isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(first), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return bpe


def sentencepiece(
    first: Sequence[str], *, prefix_space: bool, spelled: Sequence[str] = (), vocab_size: int = 320
) -> Tokenizer:
    """BPE over characters with byte fallback: the special tokens `first`, 256 bytes, then the pieces.

    spelled: tokens in `first` that are not special, so that text can contain them.
    prefix_space: prepend a space to a text, and to what follows a special token, as in Llama 2.
    """
    spaces = normalizers.Replace(" ", "▁")
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix_space else spaces
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    learner.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    tokens = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *(p for p in pieces if p not in first)]
    merges = [tuple(pair) for pair in learned["merges"]]
    bpe = Tokenizer(
        models.BPE(
            {token: n for n, token in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    bpe.normalizer = normalizer
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    bpe.decoder = decoders.Sequence([*parts, decoders.Strip(" ", left=1)] if prefix_space else parts)
    bpe.add_special_tokens([token for token in first if token not in spelled])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in spelled])
    return bpe


def begin_with(tokenizer: Tokenizer, bos: str) -> None:
    """Make the post-processor prepend `bos` to every text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def save(tokenizer: Tokenizer, folder: Path, kind: str, template: str | None, **roles: str) -> None:
    """Write the files. kind: tokenizer_class of the published tokenizer_config.json. roles: bos_token and so on."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    fast.chat_template = template
    fast.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}, indent=2))


def llama2(folder: Path, template: str | None) -> None:
    tokenizer = sentencepiece(("<unk>", "<s>", "</s>"), prefix_space=True)
    begin_with(tokenizer, "<s>")
    save(tokenizer, folder, "LlamaTokenizer", template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def llama3(folder: Path, template: str | None, *, pad: bool) -> None:
    """pad: with Llama 3.1's reserved pad. No pad_token in either case."""
    tokenizer = byte_level(split=_SPLIT_LLAMA3)
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(5)]
    third = "<|finetune_right_pad_id|>" if pad else reserved[2]
    names = ["<|begin_of_text|>", "<|end_of_text|>", *reserved[:2], third, reserved[3]]
    names += ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>" if pad else reserved[4], "<|eot_id|>"]
    if pad:
        names.append("<|python_tag|>")
    tokenizer.add_special_tokens(names)
    begin_with(tokenizer, "<|begin_of_text|>")
    eos = "<|end_of_text|>" if template is None else "<|eot_id|>"
    save(tokenizer, folder, "PreTrainedTokenizerFast", template, bos_token="<|begin_of_text|>", eos_token=eos)


def mistral(folder: Path, template: str | None, *, control: bool) -> None:
    """control: with v0.3's control tokens such as [INST]; v0.1 spells them as text."""
    names = ["<unk>", "<s>", "</s>"]
    if control:
        names += ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]
        names += ["[TOOL_RESULTS]", "[/TOOL_RESULTS]", *(f"[control_{number}]" for number in range(8, 12))]
    tokenizer = sentencepiece(names, prefix_space=True)
    begin_with(tokenizer, "<s>")
    save(tokenizer, folder, "LlamaTokenizer", template, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def qwen(folder: Path, template: str | None, *, thinks: bool) -> None:
    """No BOS. thinks: with the tokens that Qwen3 added. Those that are not control tokens are not special."""
    tokenizer = byte_level(split=_SPLIT_QWEN)
    tokenizer.normalizer = normalizers.NFC()
    kinds = ("object_ref", "box", "quad", "vision")
    pairs = [f"<|{kind}_{end}|>" for kind in kinds for end in ("start", "end")]
    pads = [f"<|{kind}_pad|>" for kind in ("vision", "image", "video")]
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *pairs, *pads])
    plain = ["<tool_call>", "</tool_call>", *(f"<|fim_{part}|>" for part in ("prefix", "middle", "suffix", "pad"))]
    plain += ["<|repo_name|>", "<|file_sep|>"]
    if thinks:
        plain += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    eos = "<|endoftext|>" if template is None else "<|im_end|>"
    save(tokenizer, folder, "Qwen2Tokenizer", template, eos_token=eos, pad_token="<|endoftext|>")


def phi3(folder: Path, template: str | None) -> None:
    """No BOS is added. The tokens of the chat format swallow white space after them."""
    tokenizer = sentencepiece(("<unk>", "<s>", "</s>"), prefix_space=True)
    holders = [f"<|placeholder{number}|>" for number in range(1, 7)]
    names = ["<|assistant|>", *holders[:4], "<|system|>", "<|end|>", *holders[4:], "<|user|>"]
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.add_special_tokens([AddedToken(name, rstrip=True, normalized=False, special=True) for name in names])
    roles = {"bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"}
    save(tokenizer, folder, "LlamaTokenizer", template, **roles)


def gemma(folder: Path, template: str | None, *, image: bool) -> None:
    """Line breaks are tokens of their own.

    image: with Gemma 3's <image_soft_token>, whose id lies one behind the last row of the text models' embedding.
    """
    spelled = ["<mask>", "[multimodal]", *(f"<unused{n}>" for n in range(4))]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *spelled, *turns, "\n", "\n\n"]
    tokenizer = sentencepiece(names, prefix_space=False, spelled=[*spelled, "\n", "\n\n"])
    if image:
        tokenizer.add_special_tokens(["<image_soft_token>"])
    begin_with(tokenizer, "<bos>")
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    save(tokenizer, folder, "GemmaTokenizer", template, **roles)


def opt(folder: Path, template: str | None) -> None:
    """</s> is BOS, EOS and unknown token; <s> exists but is not used."""
    tokenizer = byte_level(first=("<s>", "<pad>", "</s>", "<unk>"))
    begin_with(tokenizer, "</s>")
    roles = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}
    save(tokenizer, folder, "GPT2Tokenizer", template, **roles)


def gpt2(folder: Path, template: str | None) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    roles = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    save(tokenizer, folder, "GPT2Tokenizer", template, **roles)


def gpt_neox(folder: Path, template: str | None) -> None:
    """Pythia's: two special tokens first, only one of which has a role in its files."""
    tokenizer = byte_level(first=("<|endoftext|>", "<|padding|>"))
    roles = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    save(tokenizer, folder, "GPTNeoXTokenizer", template, **roles)


def gpt_oss(folder: Path, template: str | None) -> None:
    """o200k_harmony's special tokens in order (openai/harmony, public_encodings.rs), without the reserved ones."""
    tokenizer = byte_level(split=_SPLIT_LLAMA3)
    names = ("startoftext", "endoftext", "return", "constrain", "channel", "start", "end", "message", "call")
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    roles = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    save(tokenizer, folder, "PreTrainedTokenizerFast", template, **roles)


def glm4(folder: Path, template: str | None) -> None:
    """In the order that transformers' Glm4Config requires: the first, the eighth and the tenth are EOS."""
    tokenizer = byte_level(split=_SPLIT_LLAMA3)
    names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
    names += [f"<|{role}|>" for role in ("system", "user", "assistant", "observation")]
    tokenizer.add_special_tokens(names)
    spelled = [f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")]
    spelled += [f"<{end}{name}>" for name in ("arg_key", "arg_value") for end in ("", "/")]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in spelled])
    save(tokenizer, folder, "PreTrainedTokenizerFast", template, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def deepseek(folder: Path, template: str | None) -> None:
    """BOS, EOS and PAD first; EOS is also PAD. Tokens of roles, thoughts and tools are not special."""
    first = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
    tokenizer = byte_level(first=first, split=_SPLIT_LLAMA3)
    spelled = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
    kinds = ("calls", "call", "outputs", "output")
    spelled += [f"<｜tool▁{kind}▁{end}｜>" for kind in kinds for end in ("begin", "end")]
    spelled.append("<｜tool▁sep｜>")
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in spelled])
    begin_with(tokenizer, first[0])
    roles = {"bos_token": first[0], "eos_token": first[1], "pad_token": first[1]}
    save(tokenizer, folder, "PreTrainedTokenizerFast", template, **roles)
