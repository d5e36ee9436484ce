"""One good file of each kind that surefoot reads, small."""

import hashlib
import io
import json

import pyarrow
import pyarrow.parquet

from surefoot.training.state import Best, LossScale, RunState

RUN_YAML = b"""\
stage: sft
model: m
adapter: {kind: lora, rank: 8, targets: [q_proj]}
data:
  train:
    - path: d.json
      weight: 2
  eval: 0.1
batch: {size: 8, micro: auto}
optim:
  lr: 1e-4  # as ever
  betas: [0.9, 0.95]
duration: 3 epochs
output: o
"""
RECORDS = [
    {"instruction": "a", "input": "", "output": "b", "history": [["c", "d"]]},
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}],
        "tools": [],
    },
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
    {"prompt": "p", "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"},
    {"prompt": "a", "completion": "b", "label": True},
    {"text": "a"},
]
CELLS = b'instruction,output,label\n"a, b","c ""d""",1\ne,f,\n'
HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}
CONFIG = {"model_type": "llama", "hidden_size": 8, "rope_scaling": {"factor": 2.0}, "eos_token_id": [1, 2]}
TOKENIZER = {
    "bos_token": {"content": "<s>"},
    "eos_token": "</s>",
    "added_tokens": [{"id": 1, "content": "<s>", "special": True}],
    "added_tokens_decoder": {"1": {"content": "<s>"}},
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    "post_processor": {"type": "TemplateProcessing", "single": []},
    "eos_token_id": 2,
    "vocab_size": 3,
    "chat_template": "{{ a }}",
}
MANIFEST = {"schema": 1, "step": 2, "identity": {}, "files": {"a": {"size": 1, "sha256": "0"}}}
RUN_STATE = json.loads(json.dumps(RunState(step=2, norms=(1.0,), best=Best(2, 1.5), scale=LossScale(8.0)).to_json()))
LOGGED = b'{"kind": "step", "step": 1, "loss": 1.5}\n{"kind": "eval", "step": 1}\n'

ADAPTER = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/m", "revision": None, "r": 1,
    "lora_alpha": 2, "lora_dropout": 0.0, "bias": "none", "use_dora": False, "use_rslora": True,
    "target_modules": ["q_proj"], "modules_to_save": None, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {},
    "layers_to_transform": [0], "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True,
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": "auto", "gradient_accumulation_steps": 2, "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
}  # fmt: skip
INDEX = {
    "model.safetensors.index.json": {"metadata": {"total_size": 8}, "weight_map": {"a": "m-1.safetensors", "b": "m-2"}},
    "bos_zero_config.json": {"zero_bos_embedding": True, "bos_scale_factor": 0.1, "bos_token_id": 1},
}
CARD = [
    b"---\nlicense: mit\nconfigs:\n- config_name: en\n  default: true\n  data_files:\n  - split: train\n"
    b"    path: en/*.jsonl\n  - split: test\n    path: [data/**, 'en/t?st.jsonl']\n---\n# A\n",
    b"---\nconfigs:\n- {config_name: a, data_files: train.csv}\n- {config_name: default, data_files: [a, b]}\n---\n",
    b"---\ntags: [a]\n---\n", b"# A\n",
]  # fmt: skip
_ASKED = {"format": 1, "probe": "a", "question": {"b": 1}, "machine": {}}
_DIGEST = hashlib.sha256(b"{}").hexdigest()
JOURNAL = [
    {"format": 1, "about": _DIGEST},
    {"asked": _DIGEST, "answer": {"trial": None, "failure": "a", "whole": 1.5}},
]
OWN = [
    {"asked": _ASKED, "answer": {"c": 1.5}},
    {"sha256": _DIGEST, "files": {"a.npy": {"size": 1, "sha256": _DIGEST}}, "record": {}},
    {"rollbacks": [{"rollback": {"back_to": 2, "lost": 4, "ahead": 2}, "examples": [["a", 1]], "why": "loss"}]},
    {"asked": {"a": 1, "b": [2]}},
]


def parquet() -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"instruction": ["a", "b"], "output": ["c", None], "n": [1, 2]}), stream)
    return stream.getvalue()
