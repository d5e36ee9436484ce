"""What transformers' own processor and model make of questions with pictures: the reference of the stages that see.

eye = Seen("qwen2_5_vl", base)               # or any of FAMILIES
asked = question("which?", red, blue)        # red, blue: paths
eye.inputs(asked, "red")                     # of the model's forward; without an answer, of a prompt
eye.logprobs(asked, "red")                   # of the answer's tokens, [n]
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl import Qwen3VLProcessor

from helpers.seeing import PATCH, seeing
from helpers.seeing_families import FAMILIES, reference, seeing_family

QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
SEEING = (*QWEN, *FAMILIES)


def base_of(name: str, folder: Path, *, lively: bool = False) -> Path:
    """lively: with weights by which greedy answers differ from prompt to prompt."""
    base = seeing(name, folder) if name in PATCH else seeing_family(name, folder)
    if lively:
        model = AutoModelForImageTextToText.from_pretrained(base)
        for parameter in model.parameters():
            parameter.data *= 3 if parameter.ndim >= 2 else 1
        model.save_pretrained(base)
    return base


def processor_of(name: str, folder: Path) -> Any:
    """transformers' own, without its half for videos, which needs torchvision and is not asked."""
    if name in FAMILIES:
        return reference(name, folder)
    kind: Any = Qwen2_5_VLProcessor if PATCH[name] == 14 else Qwen3VLProcessor
    kind.check_argument_for_proper_class = lambda *given: None
    video = type("NoVideo", (), {"merge_size": 2, "temporal_patch_size": 2, "model_input_names": ()})()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return kind(
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer,
        video,
        chat_template=tokenizer.chat_template,
    )


@dataclass(frozen=True)
class Question:
    """first: the pictures come before the words."""

    words: str
    pictures: tuple[Path, ...]
    first: bool = False

    @property
    def turns(self) -> list[dict[str, Any]]:
        """As a record of messages has them, without the pictures' files."""
        words, shown = [{"type": "text", "text": self.words}], [{"type": "image"} for _ in self.pictures]
        return [{"role": "user", "content": [*shown, *words] if self.first else [*words, *shown]}]

    def record(self, **more: Any) -> dict[str, Any]:
        return {"prompt": self.turns, "images": [str(one) for one in self.pictures], **more}


def question(words: str, *pictures: Path) -> Question:
    return Question(words, pictures)


class Seen:
    """model: transformers' own in fp32; None: of the folder."""

    def __init__(self, name: str, base: Path, model: Any = None):
        self.processor = processor_of(name, base)
        if model is None:
            model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
        self.model = model.eval()
        self._takes = inspect.signature(type(self.model).forward).parameters

    def inputs(self, asked: Question, answer: str | None = None) -> dict[str, torch.Tensor]:
        """One row, without padding."""
        said = [] if answer is None else [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        text = self.processor.tokenizer.apply_chat_template(
            [*asked.turns, *said], tokenize=False, add_generation_prompt=answer is None
        )
        images = [[Image.open(one) for one in asked.pictures]] if asked.pictures else None
        found = dict(self.processor(text=[text], images=images, add_special_tokens=False, return_tensors="pt"))
        found = {key: one for key, one in found.items() if key in self._takes}
        if "mm_token_type_ids" in self._takes and "mm_token_type_ids" not in found:
            found["mm_token_type_ids"] = (found["input_ids"] == self.model.config.image_token_id).int()
        if "pixel_values" in found:
            found["pixel_values"] = found["pixel_values"].float()  # transformers' loader leaves Llama 4's in bf16
        return found

    def row(self, asked: Question, answer: str, stop: int) -> tuple[dict[str, torch.Tensor], int]:
        """The inputs up to the token that ends the answer, and where the answer begins."""
        begin = self.inputs(asked)["input_ids"].shape[1]
        found = self.inputs(asked, answer)
        ids = found["input_ids"][0]
        end = begin + int((ids[begin:] == stop).int().argmax()) + 1
        whole = len(ids)
        cut = {key: one[:, :end] if one.ndim > 1 and one.shape[:2] == (1, whole) else one for key, one in found.items()}
        return cut, begin

    def logprobs(self, asked: Question, answer: str, stop: int) -> torch.Tensor:
        inputs, begin = self.row(asked, answer, stop)
        logits = self.model(**inputs, use_cache=False).logits[0, begin - 1 : -1]
        return logits.log_softmax(-1).gather(1, inputs["input_ids"][0, begin:, None]).squeeze(1)

    def last_hidden(self, asked: Question, answer: str, stop: int) -> torch.Tensor:
        """[H], what the output head reads at the last token."""
        return self._read(self.row(asked, answer, stop)[0])

    def state(self, asked: Question, response: Sequence[int]) -> torch.Tensor:
        """The same behind the tokens of a response."""
        return self._read(self.continued(asked, response))

    def _read(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        read: list[torch.Tensor] = []
        hook = self.model.get_output_embeddings().register_forward_pre_hook(lambda head, given: read.append(given[0]))
        self.model(**inputs, use_cache=False)
        hook.remove()
        return read[0][0, -1]

    def continued(self, asked: Question, response: Sequence[int]) -> dict[str, torch.Tensor]:
        """The inputs of a question and the tokens of a response."""
        inputs, more = self.inputs(asked), len(response)
        whole = inputs["input_ids"].shape
        added = {"input_ids": torch.tensor([response]), "attention_mask": torch.ones(1, more, dtype=torch.long)}
        for key, one in inputs.items():
            if key == "cross_attention_mask":
                inputs[key] = torch.cat((one, one[:, -1:].expand(-1, more, -1, -1)), dim=1)
            elif one.shape == whole:
                inputs[key] = torch.cat((one, added.get(key, torch.zeros(1, more, dtype=one.dtype))), dim=1)
        return inputs

    def drawn(self, asked: Question, response: Sequence[int]) -> torch.Tensor:
        """Log-probabilities of the tokens of a response, [n]."""
        logits = self.model(**self.continued(asked, response), use_cache=False).logits[0, -len(response) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor([response]).T).squeeze(1)

    def greedy(self, asked: Question, tokens: int, stop: int) -> list[int]:
        inputs = self.inputs(asked)
        length = inputs["input_ids"].shape[1]
        with torch.no_grad():
            found = self.model.generate(
                **inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=stop, pad_token_id=0
            )
        return found[0, length:].tolist()
