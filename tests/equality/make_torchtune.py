"""Write torchtune.json: what torchtune itself makes of each config in torchtune/.

Translations of these configs are held against it. Run by hand, with the interpreter of an environment that has
torchtune 0.6.1, torchao 0.10 and surefoot's version of torch, and the folder of its recipes, on models that surefoot's
environment wrote:

    PYTHONPATH=tests .venv/bin/python -m equality.torchtune_models MODELS
    PYTHONPATH=tests OTHER/bin/python tests/equality/make_torchtune.py MODELS RECIPES

The recipes themselves train, on a CPU. Put in place of theirs are the sizes of the model, and the encoder below the
tokenizer of Llama 3: the model's own, so that texts have the same tokens; what torchtune writes around them is its own.
Qwen's tokenizer is torchtune's, with the model's vocabulary.
LoRA's A is a function of layer and module, because torchtune draws it otherwise.

Per config: ids and labels of every example in the order of the file and the learning rate of every step. Where one pass
takes all examples, its loss and gradient norm too.
"""

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchtune.models.llama3 as llama3
import torchtune.models.qwen2 as qwen2
import torchtune.models.qwen2_5 as qwen2_5
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from torchtune import config as component
from torchtune.models.llama3 import _tokenizer as llama3_tokens
from torchtune.models.qwen2_5 import _tokenizer as qwen2_5_tokens

from equality.fixed_adapter import a_values

HERE = Path(__file__).parent
# module of torchtune -> that of transformers
NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj", "w1": "gate_proj",
         "w2": "down_proj", "w3": "up_proj"}  # fmt: skip


class Encoder:
    """The model's own byte pairs, where torchtune reads a file of tiktoken."""

    def __init__(self, bos_id: int, eos_id: int, **given: Any):
        self.tokens = Tokenizer.from_file(os.environ["TOKENIZER"])
        self.base_vocab_size = self.tokens.get_vocab_size(with_added_tokens=False)
        self.ends = [bos_id], [eos_id]

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        ids = self.tokens.encode(text, add_special_tokens=False).ids
        return self.ends[0] * add_bos + ids + self.ends[1] * add_eos


def shrink(model: Path) -> None:
    """Let torchtune's builders and tokenizers of a family be those of a tiny model."""
    sizes = json.loads((model / "config.json").read_text())
    given = {
        "vocab_size": sizes["vocab_size"],
        "num_layers": sizes["num_hidden_layers"],
        "num_heads": sizes["num_attention_heads"],
        "num_kv_heads": sizes["num_key_value_heads"],
        "embed_dim": sizes["hidden_size"],
        "intermediate_dim": sizes["intermediate_size"],
        "max_seq_len": sizes["max_position_embeddings"],
        "norm_eps": sizes["rms_norm_eps"],
        "rope_base": int(sizes["rope_parameters"]["rope_theta"]),
    }
    if model.name == "qwen2":
        tied = given | {"tie_word_embeddings": sizes["tie_word_embeddings"]}
        qwen2_5.qwen2_5_0_5b = lambda: qwen2.qwen2(**tied)
        qwen2_5.lora_qwen2_5_0_5b = lambda lora_attn_modules, **more: qwen2.lora_qwen2(
            list(lora_attn_modules), **tied, **more
        )
        ids = known(model, qwen2_5_tokens.QWEN2_5_SPECIAL_TOKENS)
        pairs = json.loads((model / "tokenizer.json").read_text())["model"]
        (model / "vocab.json").write_text(json.dumps(pairs["vocab"]))
        (model / "merges.txt").write_text("\n".join(map(" ".join, pairs["merges"])))
        qwen2_5.qwen2_5_tokenizer = lambda path, merges_file, max_seq_len=None: qwen2_5_tokens.Qwen2_5Tokenizer(
            path, merges_file, ids, max_seq_len
        )
        return
    llama3.llama3_8b = lambda: llama3.llama3(**given)
    llama3.lora_llama3_8b = lambda lora_attn_modules, **more: llama3.lora_llama3(
        list(lora_attn_modules), **given, **more
    )
    ids = known(model, llama3_tokens.SPECIAL_TOKENS)
    ids["<|finetune_right_pad_id|>"] = 0  # a token of the model: padding is read, and carries no loss
    llama3.llama3_tokenizer = lambda path, max_seq_len=None: llama3_tokens.Llama3Tokenizer(path, ids, max_seq_len)
    os.environ["TOKENIZER"] = str(model / "tokenizer.json")
    llama3_tokens.TikTokenBaseTokenizer = Encoder


def known(model: Path, names: Iterable[str]) -> dict[str, int]:
    """Ids of special tokens; those that the model lacks, and no text here has, get ids behind all others."""
    tokens = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = {name: tokens.token_to_id(name) for name in names}
    return {name: 10**6 + place if ids[name] is None else ids[name] for place, name in enumerate(ids)}


def recipe_of(words: Any, recipes: Path) -> Any:
    kind = "lora_finetune" if "lora" in words.model._component_ else "full_finetune"
    path = recipes / f"{kind}_single_device.py"
    spec = importlib.util.spec_from_file_location(kind, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name = {"lora_finetune": "LoRAFinetuneRecipeSingleDevice", "full_finetune": "FullFinetuneRecipeSingleDevice"}[kind]
    return getattr(module, name)(cfg=words)


@contextlib.contextmanager
def working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def reference(path: Path, models: Path, recipes: Path) -> dict[str, Any]:
    model = models / ("qwen2" if path.stem.startswith("qwen") else "llama3")
    shrink(model)
    text = path.read_text().replace("MODEL", str(model))
    words = OmegaConf.create(text)
    words.dataset.data_files = str(HERE / words.dataset.data_files)
    with tempfile.TemporaryDirectory() as folder, working_in(folder):
        tokenizer = component.instantiate(words.tokenizer)
        data = component.instantiate(words.dataset, tokenizer)
        examples = [{"ids": row["tokens"], "labels": [int(one) for one in row["labels"]]} for row in data]
        recipe = recipe_of(words, recipes)
        recipe.setup(words)
        for name, parameter in recipe._model.named_parameters():
            if "lora_a" in name:
                _, layer, *_, module, _, _ = name.split(".")
                parameter.data.copy_(a_values(int(layer), NAMES[module], *parameter.shape))
        steps: list[dict[str, float]] = []
        take = recipe._optimizer.step

        def recorded(*given: Any, **more: Any) -> Any:
            norms = [p.grad.norm() for p in recipe._model.parameters() if p.grad is not None]
            rate = recipe._optimizer.param_groups[0]["lr"]
            steps.append({"rate": float(rate), "norm": float(torch.stack(norms).norm())})
            return take(*given, **more)

        recipe._optimizer.step = recorded
        losses: list[float] = []
        recipe._metric_logger.log_dict = lambda found, step: losses.append(float(found["loss"]))
        recipe.save_checkpoint = lambda epoch: None
        recipe.train()
    whole = words.batch_size == len(examples)
    return {
        "examples": examples,
        "learning_rates": [step["rate"] for step in steps],
        "first_loss": losses[0] if whole else None,
        "first_grad_norm": steps[0]["norm"] if whole else None,
    }


def main(models: Path, recipes: Path) -> None:
    found = {path.stem: reference(path, models, recipes) for path in sorted((HERE / "torchtune").glob("*.yaml"))}
    (HERE / "torchtune.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
