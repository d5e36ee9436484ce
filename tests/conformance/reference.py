"""The other side of the table: transformers and PEFT alone, as a person would write it who has never seen surefoot.

Attention is eager, every example runs by itself and unpadded, the loss is the model's own (`labels=`), the adapter is
PEFT's on targets written by hand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

# A gradient below this share of all gradients' norm is zero in exact arithmetic (of OPT's key biases, of A while B is
# zero) and rounding in fp32: its error is taken against that norm, not against itself.
_ROUNDING = 1e-6
# What checkpoints that also see call the rest of them.
_SIGHT = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "embed_vision", "projector")
# The gradient of a single number (Apertus' activation has two a layer) is a sum over all tokens and channels, which may
# cancel: transformers' own in fp32 is 3e-5 from that in fp64 there, and surefoot's 2e-5.
_CANCELS = 1e-3


def opened(folder: Path, **options: Any) -> PreTrainedModel:
    """By transformers' class of its kind. options: of `from_pretrained`."""
    sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    return (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(folder, **options)


def plain_model(
    base: Path, kind: str, targets: frozenset[str], parameters: frozenset[str], rank: int, alpha: int
) -> nn.Module:
    """The base model, with PEFT's adapter unless kind is full, without dropout."""
    model = opened(base, dtype=torch.float32, attn_implementation="eager")
    if kind == "full":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(of_text(name))
        return model
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        target_modules=sorted(targets),
        target_parameters=sorted(parameters) or None,
        use_dora=kind == "dora",
    )
    return get_peft_model(model, config)


def of_text(name: str) -> bool:
    """Whether a parameter or module is the language model's. What sees, and what joins it to the text, stay frozen."""
    return not any(part in _SIGHT for part in name.split("."))


def take_trainable(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy the values of our trainable parameters. Raises KeyError where the names differ."""
    ours = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if ours != values.keys():
        raise KeyError(f"trainable here and not there, or there and not here: {sorted(ours ^ values.keys())[:4]}")
    with torch.no_grad():
        for name, value in values.items():
            model.get_parameter(name).copy_(value)


def loss_and_gradients(
    model: nn.Module, examples: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over all labels of the step, and the gradient of every trainable parameter.

    examples: ids [T] and labels [T], -100 where nothing is to be learned, of each.
    """
    model.eval()  # dropout off
    model.zero_grad()
    counts = [int((labels[1:] != -100).sum()) for _, labels in examples]
    total = 0.0
    for (ids, labels), count in zip(examples, counts, strict=True):
        mean = model(input_ids=ids[None], labels=labels[None], use_cache=False).loss
        loss = mean * count / sum(counts)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of any one parameter's gradient; infinite where the sets of names differ."""
    if ours.keys() != theirs.keys():
        return float("inf")
    total = torch.stack([gradient.double().norm() for gradient in theirs.values()]).norm()
    worst = 0.0
    for name, gradient in theirs.items():
        norm = gradient.double().norm()
        size = norm if norm > _ROUNDING * total else total
        size = max(size, _CANCELS * total) if gradient.numel() == 1 else size
        worst = max(worst, float((ours[name].double() - gradient.double()).norm() / size))
    return worst


def reloaded(base: Path, output: Path, kind: str) -> nn.Module:
    """What a run wrote, opened by transformers or PEFT."""
    if kind == "full":
        return opened(output)
    return PeftModel.from_pretrained(opened(base), output)


@torch.no_grad()
def logits(model: nn.Module, folder: Path, text: str) -> torch.Tensor:
    """Logits [T, V] of `text` under the tokenizer in `folder`, in fp64 for comparison."""
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    return model.eval()(input_ids=ids, use_cache=False).logits[0].double()
