"""Commands and configs of other tools, as their public documentation writes them, and what each comes to here.

None is copied: each names settings that a guide, a reference or an example of the tool names, with values of its own.
The expected configs were checked by hand against the tools' own defaults.
"""

# ruff: noqa: E501
from __future__ import annotations

from typing import Any

COMMANDS: dict[str, str] = {
    "guide-before": 'python finetune.py --base_model="meta-llama/Llama-3.1-8B" --adapter_name="dora" --lora_r=32 --lora_alpha=64 --bf16=True',
    "guide-shell-script": "accelerate launch finetune.py --base_model meta-llama/Llama-3.1-8B --data_path ./commonsense_170k.json --output_dir ./output --adapter_name dora --lora_r 32 --lora_alpha 64 --target_modules q_proj k_proj v_proj o_proj up_proj down_proj gate_proj --batch_size 128 --per_device_train_batch_size 2 --num_epochs 3 --learning_rate 3e-5 --bf16 True --attn_implementation eager --disable_cudnn_sdpa True --enable_torch_compile False --seed 42",
    "guide-performance": "python finetune.py --base_model=meta-llama/Llama-3.1-8B --adapter_name=dora --target_modules q_proj k_proj v_proj o_proj up_proj down_proj gate_proj --lora_r=32 --lora_alpha=64 --batch_size=128 --per_device_train_batch_size=2 --bf16=True --attn_implementation=flash_attention_2 --disable_cudnn_sdpa=False --enable_torch_compile=True",
    "guide-fp16": "python finetune.py --base_model=x --bf16=False --fp16=True --disable_flash_sdpa=True --val_set_size 0",
    "dora-repository": 'python finetune.py --base_model yahma/llama-7b-hf --data_path commonsense_170k.json --output_dir out --batch_size 16 --micro_batch_size 16 --num_epochs 3 --learning_rate 2e-4 --cutoff_len 256 --val_set_size 120 --eval_step 80 --save_step 80 --adapter_name dora --target_modules \'["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"]\' --lora_r 32 --lora_alpha 64 --use_gradient_checkpointing',
    "llm-adapters": "python finetune.py --base_model yahma/llama-7b-hf --data_path math_10k.json --output_dir ./trained_models/llama-lora --batch_size 16 --micro_batch_size 4 --num_epochs 3 --learning_rate 3e-4 --cutoff_len 256 --val_set_size 120 --adapter_name lora --wandb_project p --wandb_run_name r --train_on_inputs",
    "alpaca-lora": "python finetune.py --base_model=m --num_epochs=10 --cutoff_len=512 --group_by_length --output_dir=./lora-alpaca --lora_target_modules='[q_proj,k_proj,v_proj,o_proj]' --lora_r=16 --micro_batch_size=8",
    "train-sft": "python train_sft.py --model m --data d.json --out o --micro-bsz 8 --accum 8 --bf16 --tf32",
    "train-sft-compiled": "python train_sft.py --model m --data d.json --out o --micro-bsz 4 --accum 2 --torch-compile --compile-mode max-autotune --workers 1 --lora-r 8",
    "trl-full": "trl sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-5 --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --output_dir Qwen2-0.5B-SFT",
    "trl-lora": "trl sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 --lora_alpha 16 --output_dir Qwen2-0.5B-SFT",
    "trl-qlora-dora": "trl sft --model_name_or_path m --dataset_name d --dataset_config main --use_peft --use_dora --lora_target_modules all-linear --load_in_4bit --use_bnb_nested_quant --assistant_only_loss --max_steps 100 --warmup_ratio 0.1 --output_dir o",
    "trl-script": "accelerate launch --num_processes 1 trl/scripts/sft.py --model_name_or_path m --dataset_name d --fp16 --gradient_checkpointing False --completion_only_loss --torch_dtype float16 --output_dir o",
    "trl-config": "trl sft --config sft_config.yaml --learning_rate 1e-4",
    "axolotl-train": "axolotl train lora.yml --learning-rate 1e-4 --micro-batch-size 4",
    "axolotl-module": "accelerate launch -m axolotl.cli.train lora.yml",
    "tune-run": "tune run lora_finetune_single_device --config lora.yaml batch_size=8 model.lora_rank=32 dataset.packed=False",
}

FILES: dict[str, str] = {
    "sft_config.yaml": """\
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: stanfordnlp/imdb
report_to: none
learning_rate: 0.0001
lr_scheduler_type: cosine
output_dir: out
env:
  SOME_SWITCH: "1"
""",
    "lora.yml": """\
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: false
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules:
  - gate_proj
  - down_proj
  - q_proj
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
""",
    "qlora.yml": """\
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: data/chat.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
chat_template: chatml
sequence_len: 4096
sample_packing: false
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 4
optimizer: paged_adamw_8bit
lr_scheduler: linear
learning_rate: 2e-4
warmup_steps: 10
bf16: true
save_steps: 500
special_tokens:
  pad_token: <|end_of_text|>
wandb_project: my-project
wandb_name: first
output_dir: out
""",
    "full.yml": """\
base_model: meta-llama/Meta-Llama-3-8B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
test_datasets:
  - path: held/out.jsonl
    type: alpaca
sequence_len: 8192
excess_length_strategy: truncate
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: constant
learning_rate: 2e-5
bf16: full
sdp_attention: true
eval_strategy: epoch
save_strategy: epoch
early_stopping_patience: 3
weight_decay: 0.1
max_steps: 200
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
""",
    "completion.yml": """\
base_model: m
datasets:
  - path: data/book.jsonl
    type: completion
    field: body
sequence_len: 1024
micro_batch_size: 4
learning_rate: 1e-4
bf16: false
num_epochs: 2
lr_scheduler: constant
save_strategy: "no"
seed: 7
""",
    "lora.yaml": """\
output_dir: /tmp/torchtune/llama3_1_8B/lora
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /models/llama/original/tokenizer.model
  max_seq_len: null
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama
  checkpoint_files: [model-00001-of-00001.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
save_adapter_weights_only: False
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
seed: null
shuffle: True
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
log_peak_memory_stats: True
device: cuda
dtype: bf16
enable_activation_checkpointing: True
enable_activation_offloading: False
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
""",
    "qlora.yaml": """\
output_dir: out
model:
  _component_: torchtune.models.llama2.qlora_llama2_7b
  lora_attn_modules: ['q_proj', 'v_proj']
  lora_rank: 16
  lora_alpha: 32
  use_dora: True
tokenizer:
  _component_: torchtune.models.llama2.llama2_tokenizer
  path: t.model
  max_seq_len: 512
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama2
  checkpoint_files: [a.safetensors]
  model_type: LLAMA2
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: data/chats.json
  conversation_column: dialogue
  conversation_style: sharegpt
  split: train
seed: 3
batch_size: 4
gradient_accumulation_steps: 4
epochs: 2
max_steps_per_epoch: 50
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 2e-5
clip_grad_norm: 1.0
device: cpu
dtype: fp32
metric_logger:
  _component_: torchtune.training.metric_logging.WandBLogger
  project: tune
resume_from_checkpoint: True
""",
    "full.yaml": """\
output_dir: out
model:
  _component_: torchtune.models.qwen2.qwen2_0_5b
tokenizer:
  _component_: torchtune.models.qwen2.qwen2_tokenizer
  path: vocab.json
  merges_file: merges.txt
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/qwen2
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: org/questions
  column_map: {input: question, output: answer}
batch_size: 4
epochs: 1
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
optimizer_in_bwd: True
dtype: bf16
compile: True
""",
    "simple_finetune.py": """\
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

MODEL_NAME = "distilgpt2"
OUT = "runs"
tokenizer = AutoTokenizer.from_pretrained(MODEL_NAME)
model = AutoModelForCausalLM.from_pretrained(MODEL_NAME, torch_dtype=torch.float16, device_map="auto")
data = load_dataset("json", data_files="train.json", split="train")
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=256))
training_args = TrainingArguments(
    output_dir=f"{OUT}/first",
    num_train_epochs=3,
    per_device_train_batch_size=2 * 2,
    gradient_accumulation_steps=4,
    evaluation_strategy="no",
    warmup_ratio=0.1,
    learning_rate=2e-5,
    logging_steps=10,
    save_total_limit=2,
    fp16=torch.cuda.is_available(),
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model=model, args=training_args, train_dataset=data, tokenizer=tokenizer, data_collator=collator)
trainer.train()
""",
    "peft_script.py": """\
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
import torch

def main():
    bnb = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = AutoModelForCausalLM.from_pretrained("org/model", quantization_config=bnb, attn_implementation="sdpa")
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, bias="none", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    raw = load_dataset("org/data", "main")
    split = raw["train"].train_test_split(test_size=0.1, seed=1)
    options = {"bf16": True, "optim": "paged_adamw_8bit"}
    args = TrainingArguments("out", max_steps=200, warmup_steps=20, eval_strategy="steps", eval_steps=50, save_steps=50,
                             load_best_model_at_end=True, lr_scheduler_type="cosine", report_to="none", **options)
    Trainer(model=model, args=args, train_dataset=split["train"], eval_dataset=split["test"]).train()
""",
    "sft_script.py": """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from peft import LoraConfig

LR = 1e-4
trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    train_dataset=load_dataset("trl-lib/Capybara", split="train[:1000]"),
    args=SFTConfig(output_dir="out", max_length=512, learning_rate=LR / 2, assistant_only_loss=True, max_steps=10),
    peft_config=LoraConfig(r=16, target_modules="all-linear", use_rslora=True),
)
trainer.train()
""",
}

BY_RECORD = {"template": "by-record", "train_on": "by-record"}
EXPECTED: dict[str, dict[str, Any]] = {
    "guide-before": {
        "stage": "sft",
        "model": {"path": "meta-llama/Llama-3.1-8B"},
        "tokenizer": {"pad": "add"},
        "adapter": {"kind": "dora", "rank": 32, "alpha": 64, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
        "data": {"train": "yahma/alpaca-cleaned", "eval": 2000, "template": "commonsense", "max_length": 256},
        "precision": {"compute": "bf16", "base": "fp32"},
        "attention": {"implementation": "eager", "cudnn": "off"},
        "batch": {"size": 128, "micro": 4},
        "optim": {"lr": 0.0003, "warmup": "300 steps", "warmup_from_zero": True, "weight_decay": 0.01},
        "log_every": 50,
        "output": "./output",
    },
    "guide-shell-script": {
        "stage": "sft",
        "model": {"path": "meta-llama/Llama-3.1-8B"},
        "tokenizer": {"pad": "add"},
        "adapter": {
            "kind": "dora",
            "rank": 32,
            "alpha": 64,
            "dropout": 0.05,
            "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"],
        },
        "data": {"train": "./commonsense_170k.json", "eval": 2000, "template": "commonsense", "max_length": 256},
        "precision": {"compute": "bf16", "base": "fp32"},
        "attention": {"implementation": "eager", "cudnn": "off"},
        "compile": "off",
        "batch": {"size": 128, "micro": 2},
        "optim": {"lr": 3e-05, "warmup": "300 steps", "warmup_from_zero": True, "weight_decay": 0.01},
        "duration": "3 epochs",
        "log_every": 50,
        "output": "./output",
        "seed": 42,
    },
    "guide-performance": {
        "stage": "sft",
        "model": {"path": "meta-llama/Llama-3.1-8B"},
        "tokenizer": {"pad": "add"},
        "adapter": {
            "kind": "dora",
            "rank": 32,
            "alpha": 64,
            "dropout": 0.05,
            "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"],
        },
        "data": {"train": "yahma/alpaca-cleaned", "eval": 2000, "template": "commonsense", "max_length": 256},
        "precision": {"compute": "bf16", "base": "fp32"},
        "attention": {"implementation": "flash_attention_2", "cudnn": "auto"},
        "compile": "default",
        "batch": {"size": 128, "micro": 2},
        "optim": {"lr": 0.0003, "warmup": "300 steps", "warmup_from_zero": True, "weight_decay": 0.01},
        "log_every": 50,
        "output": "./output",
    },
    "guide-fp16": {
        "stage": "sft",
        "model": {"path": "x"},
        "tokenizer": {"pad": "add"},
        "adapter": {"kind": "lora", "rank": 8, "alpha": 16, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
        "data": {"train": "yahma/alpaca-cleaned", "eval": "none", "template": "commonsense", "max_length": 256},
        "precision": {"compute": "fp16", "base": "fp32"},
        "attention": {"implementation": "eager", "flash": "off", "cudnn": "off"},
        "batch": {"size": 128, "micro": 4},
        "optim": {"lr": 0.0003, "warmup": "300 steps", "warmup_from_zero": True, "weight_decay": 0.01},
        "log_every": 50,
        "output": "./output",
    },
    "dora-repository": {
        "stage": "sft",
        "model": {"path": "yahma/llama-7b-hf"},
        "adapter": {
            "kind": "dora",
            "rank": 32,
            "alpha": 64,
            "dropout": 0.05,
            "targets": ["q_proj", "k_proj", "v_proj", "up_proj", "down_proj"],
        },
        "data": {
            "train": "commonsense_170k.json",
            "eval": 120,
            "template": "commonsense",
            "max_length": 256,
            "train_on": "everything",
            "encoding": "whole",
        },
        "precision": {"compute": "fp16", "base": "fp16"},
        "gradient_checkpointing": "on",
        "batch": {"size": 16, "micro": 16},
        "optim": {"lr": 0.0002, "schedule": "linear", "warmup": "100 steps", "warmup_from_zero": True},
        "duration": "3 epochs",
        "log_every": 10,
        "eval_every": "80 steps",
        "checkpoint": {"every": "80 steps"},
        "output": "out",
    },
    "llm-adapters": {
        "stage": "sft",
        "model": {"path": "yahma/llama-7b-hf"},
        "adapter": {"kind": "lora", "rank": 8, "alpha": 16, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
        "data": {
            "train": "math_10k.json",
            "eval": 120,
            "template": "commonsense",
            "max_length": 256,
            "train_on": "everything",
            "encoding": "whole",
        },
        "precision": {"compute": "fp16", "base": "fp16"},
        "batch": {"size": 16, "micro": 4},
        "optim": {"lr": 0.0003, "schedule": "linear", "warmup": "100 steps", "warmup_from_zero": True},
        "duration": "3 epochs",
        "log_every": 10,
        "report_to": ["wandb"],
        "tracking": {"project": "p", "name": "r"},
        "output": "./trained_models/llama-lora",
    },
    "alpaca-lora": {
        "stage": "sft",
        "model": {"path": "m"},
        "adapter": {
            "kind": "lora",
            "rank": 16,
            "alpha": 16,
            "dropout": 0.05,
            "targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
        },
        "data": {
            "train": "yahma/alpaca-cleaned",
            "eval": 2000,
            "template": "alpaca",
            "max_length": 512,
            "train_on": "everything",
            "encoding": "whole",
        },
        "precision": {"compute": "fp16", "base": "fp16"},
        "batch": {"size": 128, "micro": 8},
        "optim": {"lr": 0.0003, "schedule": "linear", "warmup": "100 steps", "warmup_from_zero": True},
        "duration": "10 epochs",
        "log_every": 10,
        "output": "./lora-alpaca",
    },
    "train-sft": {
        "stage": "sft",
        "model": {"path": "m"},
        "data": {"train": "d.json"},
        "precision": {"compute": "bf16", "tf32": "on"},
        "batch": {"size": 64, "micro": 8},
        "output": "o",
    },
    "train-sft-compiled": {
        "stage": "sft",
        "model": {"path": "m"},
        "adapter": {"kind": "lora", "rank": 8},
        "data": {"train": "d.json", "workers": 1},
        "compile": "max-autotune",
        "batch": {"size": 8, "micro": 4},
        "output": "o",
    },
    "trl-full": {
        "stage": "sft",
        "model": {"path": "Qwen/Qwen2-0.5B"},
        "data": {"train": "trl-lib/Capybara", **BY_RECORD, "max_length": 1024, "encoding": "whole"},
        "precision": {"compute": "bf16"},
        "gradient_checkpointing": "on",
        "batch": {"size": 16, "micro": 2},
        "optim": {"lr": 2e-05, "schedule": "linear", "warmup": 0.0},
        "duration": "1 epoch",
        "log_every": 10,
        "checkpoint": {"every": "500 steps", "keep": 1000},
        "bos": {"prepend": "tokenizer"},
        "output": "Qwen2-0.5B-SFT",
    },
    "trl-lora": {
        "stage": "sft",
        "model": {"path": "Qwen/Qwen2-0.5B"},
        "adapter": {"kind": "lora", "rank": 32, "alpha": 16, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
        "data": {
            "train": "trl-lib/Capybara",
            "eval": {"path": "trl-lib/Capybara", "split": "test"},
            **BY_RECORD,
            "max_length": 1024,
            "encoding": "whole",
        },
        "precision": {"compute": "bf16", "base": "fp32"},
        "gradient_checkpointing": "on",
        "batch": {"size": 16, "micro": 2},
        "optim": {"lr": 0.0002, "schedule": "linear", "warmup": 0.0},
        "duration": "1 epoch",
        "log_every": 10,
        "eval_every": "100 steps",
        "checkpoint": {"every": "500 steps", "keep": 1000, "best": "none"},
        "bos": {"prepend": "tokenizer"},
        "output": "Qwen2-0.5B-SFT",
    },
    "trl-qlora-dora": {
        "stage": "sft",
        "model": {"path": "m"},
        "adapter": {"kind": "dora", "dropout": 0.05, "targets": "all-linear"},
        "data": {
            "train": {"path": "d", "subset": "main"},
            "template": "by-record",
            "max_length": 1024,
            "train_on": "responses",
            "encoding": "whole",
        },
        "precision": {"compute": "bf16", "base": "nf4"},
        "gradient_checkpointing": "on",
        "batch": {"size": 8, "micro": 8},
        "optim": {"lr": 2e-05, "schedule": "linear", "warmup": "10 steps", "warmup_from_zero": True},
        "duration": "100 steps",
        "log_every": 10,
        "checkpoint": {"every": "500 steps", "keep": 1000},
        "bos": {"prepend": "tokenizer"},
        "output": "o",
    },
    "trl-script": {
        "stage": "sft",
        "model": {"path": "m"},
        "data": {
            "train": "d",
            "template": "by-record",
            "max_length": 1024,
            "train_on": "completion",
            "encoding": "whole",
        },
        "precision": {"compute": "fp16"},
        "gradient_checkpointing": "off",
        "batch": {"size": 8, "micro": 8},
        "optim": {"lr": 2e-05, "schedule": "linear", "warmup": 0.0},
        "log_every": 10,
        "checkpoint": {"every": "500 steps", "keep": 1000},
        "bos": {"prepend": "tokenizer"},
        "output": "o",
    },
    "trl-config": {
        "stage": "sft",
        "model": {"path": "Qwen/Qwen2.5-0.5B"},
        "data": {"train": "stanfordnlp/imdb", **BY_RECORD, "max_length": 1024, "encoding": "whole"},
        "precision": {"compute": "bf16"},
        "gradient_checkpointing": "on",
        "batch": {"size": 8, "micro": 8},
        "optim": {"lr": 0.0001, "schedule": "cosine", "warmup": 0.0},
        "log_every": 10,
        "checkpoint": {"every": "500 steps", "keep": 1000},
        "report_to": [],
        "bos": {"prepend": "tokenizer"},
        "output": "out",
    },
    "axolotl-module": {
        "stage": "sft",
        "model": {"path": "NousResearch/Llama-3.2-1B"},
        "adapter": {
            "kind": "lora",
            "rank": 16,
            "alpha": 32,
            "dropout": 0.05,
            "targets": ["gate_proj", "down_proj", "q_proj"],
        },
        "data": {
            "train": {"path": "teknium/GPT4-LLM-Cleaned", "format": "alpaca"},
            "eval": 0.1,
            "template": "alpaca",
            "max_length": 2048,
        },
        "precision": {"compute": "auto", "base": "auto", "tf32": "off"},
        "gradient_checkpointing": "on",
        "batch": {"size": 4, "micro": 2},
        "optim": {
            "name": "adamw_8bit",
            "lr": 0.0002,
            "schedule": "cosine",
            "warmup": 0.1,
            "warmup_from_zero": True,
            "weight_decay": 0.0,
        },
        "duration": "1 epoch",
        "log_every": 1,
        "eval_every": "0.25 epochs",
        "checkpoint": {"every": "1 epoch", "keep": 4, "best": "none"},
        "bos": {"prepend": "tokenizer"},
        "output": "./outputs/lora-out",
    },
    "tune-run": {
        "stage": "sft",
        "model": {"path": "/models/llama"},
        "adapter": {
            "kind": "lora",
            "rank": 32,
            "alpha": 16,
            "dropout": 0.0,
            "targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
        "data": {
            "train": {"path": "yahma/alpaca-cleaned", "format": "alpaca"},
            "template": "alpaca",
            "max_length": "model",
            "train_on": "everything",
        },
        "precision": {"compute": "bf16", "base": "bf16"},
        "compile": "off",
        "gradient_checkpointing": "on",
        "batch": {"size": 64, "micro": 8},
        "optim": {
            "name": "adamw",
            "lr": 0.0003,
            "schedule": "cosine",
            "warmup": "100 steps",
            "warmup_from_zero": True,
            "weight_decay": 0.01,
            "max_grad_norm": None,
        },
        "duration": "1 epoch",
        "log_every": 1,
        "checkpoint": {"every": "1 epoch", "keep": 1000},
        "report_to": [],
        "output": "/tmp/torchtune/llama3_1_8B/lora",
    },
    "qlora.yml": {
        "stage": "sft",
        "model": {"path": "NousResearch/Llama-3.2-1B"},
        "tokenizer": {"pad": "<|end_of_text|>"},
        "adapter": {"kind": "lora", "rank": 32, "alpha": 16, "dropout": 0.05, "targets": "all-linear"},
        "data": {
            "train": {"path": "data/chat.jsonl", "format": "sharegpt"},
            "template": "chatml",
            "max_length": 4096,
            "encoding": "whole",
        },
        "precision": {"compute": "bf16", "base": "nf4"},
        "gradient_checkpointing": "off",
        "batch": {"size": 8, "micro": 2},
        "optim": {
            "name": "adamw_8bit",
            "lr": 0.0002,
            "schedule": "linear",
            "warmup": "10 steps",
            "warmup_from_zero": True,
        },
        "duration": "4 epochs",
        "checkpoint": {"every": "500 steps", "keep": 4},
        "report_to": ["wandb"],
        "tracking": {"project": "my-project", "name": "first"},
        "bos": {"prepend": "off"},
        "output": "out",
    },
    "full.yml": {
        "stage": "sft",
        "model": {"path": "meta-llama/Meta-Llama-3-8B"},
        "data": {
            "train": {"path": "tatsu-lab/alpaca", "format": "alpaca"},
            "eval": {"path": "held/out.jsonl", "format": "alpaca"},
            "template": "alpaca",
            "max_length": 8192,
        },
        "precision": {"compute": "bf16"},
        "attention": {"implementation": "sdpa"},
        "gradient_checkpointing": "off",
        "batch": {"size": 8, "micro": 1},
        "optim": {"name": "adamw", "lr": 2e-05, "schedule": "constant", "warmup": 0.0, "weight_decay": 0.1},
        "duration": "200 steps",
        "eval_every": "1 epoch",
        "checkpoint": {"every": "1 epoch", "keep": 4},
        "early_stopping": {"patience": 3},
        "bos": {"prepend": "tokenizer"},
        "output": "./model-out",
    },
    "completion.yml": {
        "stage": "pretrain",
        "model": {"path": "m"},
        "data": {
            "train": {"path": "data/book.jsonl", "format": "text", "columns": {"text": "body"}},
            "max_length": 1024,
        },
        "precision": {"compute": "fp32"},
        "gradient_checkpointing": "off",
        "batch": {"size": 4, "micro": 4},
        "optim": {"lr": 0.0001, "schedule": "constant", "warmup": 0.0},
        "duration": "2 epochs",
        "checkpoint": {"every": "2 epochs", "keep": 4},
        "output": "./model-out",
        "seed": 7,
    },
    "lora.yaml": {
        "stage": "sft",
        "model": {"path": "/models/llama"},
        "adapter": {
            "kind": "lora",
            "rank": 8,
            "alpha": 16,
            "dropout": 0.0,
            "targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
        "data": {
            "train": {"path": "yahma/alpaca-cleaned", "format": "alpaca"},
            "template": "alpaca",
            "max_length": "model",
            "train_on": "everything",
        },
        "precision": {"compute": "bf16", "base": "bf16"},
        "compile": "off",
        "gradient_checkpointing": "on",
        "batch": {"size": 16, "micro": 2},
        "optim": {
            "name": "adamw",
            "lr": 0.0003,
            "schedule": "cosine",
            "warmup": "100 steps",
            "warmup_from_zero": True,
            "weight_decay": 0.01,
            "max_grad_norm": None,
        },
        "duration": "1 epoch",
        "log_every": 1,
        "checkpoint": {"every": "1 epoch", "keep": 1000},
        "report_to": [],
        "output": "/tmp/torchtune/llama3_1_8B/lora",
    },
    "qlora.yaml": {
        "stage": "sft",
        "model": {"path": "/models/llama2"},
        "adapter": {"kind": "dora", "rank": 16, "alpha": 32, "targets": ["q_proj", "v_proj"]},
        "data": {
            "train": {"path": "data/chats.json", "format": "sharegpt", "columns": {"conversations": "dialogue"}},
            "template": "llama2",
            "max_length": 512,
        },
        "precision": {"compute": "fp32", "base": "nf4"},
        "gradient_checkpointing": "off",
        "batch": {"size": 16, "micro": 4},
        "optim": {
            "name": "adamw_8bit",
            "lr": 2e-05,
            "schedule": "constant",
            "warmup": 0.0,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
        },
        "duration": "100 steps",
        "checkpoint": {"every": "1 epoch", "keep": 1000},
        "report_to": ["wandb"],
        "tracking": {"project": "tune"},
        "output": "out",
        "seed": 3,
    },
    "full.yaml": {
        "stage": "sft",
        "model": {"path": "/models/qwen2"},
        "data": {
            "train": {
                "path": "org/questions",
                "format": "alpaca",
                "columns": {"instruction": "question", "output": "answer"},
            },
            "template": "chatml",
            "max_length": "model",
        },
        "precision": {"compute": "bf16"},
        "compile": "default",
        "gradient_checkpointing": "off",
        "batch": {"size": 4, "micro": 4},
        "optim": {
            "name": "adamw",
            "lr": 2e-05,
            "schedule": "constant",
            "warmup": 0.0,
            "weight_decay": 0.01,
            "max_grad_norm": None,
        },
        "duration": "1 epoch",
        "checkpoint": {"every": "1 epoch", "keep": 1000},
        "output": "out",
    },
    "simple_finetune.py": {
        "stage": "sft",
        "model": {"path": "distilgpt2"},
        "data": {"train": "train.json", "max_length": 256, "train_on": "everything", "encoding": "whole"},
        "gradient_checkpointing": "off",
        "batch": {"size": 16, "micro": 4},
        "optim": {"lr": 2e-05, "schedule": "linear", "warmup": 0.1, "warmup_from_zero": True},
        "duration": "3 epochs",
        "log_every": 10,
        "checkpoint": {"every": "500 steps", "keep": 2},
        "output": "runs/first",
    },
    "peft_script.py": {
        "stage": "sft",
        "model": {"path": "org/model"},
        "adapter": {"kind": "lora", "rank": 8, "alpha": 16, "dropout": 0.05, "targets": ["q_proj", "v_proj"]},
        "data": {
            "train": {"path": "org/data", "subset": "main"},
            "eval": 0.1,
            "train_on": "everything",
            "encoding": "whole",
        },
        "precision": {"compute": "bf16", "base": "nf4"},
        "attention": {"implementation": "sdpa"},
        "gradient_checkpointing": "off",
        "batch": {"size": 8, "micro": 8},
        "optim": {
            "name": "adamw_8bit",
            "lr": 5e-05,
            "schedule": "cosine",
            "warmup": "20 steps",
            "warmup_from_zero": True,
        },
        "duration": "200 steps",
        "log_every": 500,
        "eval_every": "50 steps",
        "checkpoint": {"every": "50 steps", "keep": 1000, "best": "loss"},
        "report_to": [],
        "output": "out",
    },
    "sft_script.py": {
        "stage": "sft",
        "model": {"path": "Qwen/Qwen2.5-0.5B"},
        "adapter": {"kind": "lora", "rank": 16, "alpha": 8, "targets": "all-linear", "rslora": True},
        "data": {
            "train": {"path": "trl-lib/Capybara", "max_samples": 1000},
            "template": "by-record",
            "max_length": 512,
            "train_on": "responses",
            "encoding": "whole",
        },
        "precision": {"compute": "bf16", "base": "fp32"},
        "gradient_checkpointing": "on",
        "batch": {"size": 8, "micro": 8},
        "optim": {"lr": 5e-05, "schedule": "linear", "warmup": 0.0},
        "duration": "10 steps",
        "log_every": 10,
        "checkpoint": {"every": "500 steps", "keep": 1000},
        "bos": {"prepend": "tokenizer"},
        "output": "out",
    },
}
# What a command names a file for means what the file says, but for the words behind it.
EXPECTED["sft_config.yaml"], EXPECTED["lora.yml"] = EXPECTED["trl-config"], EXPECTED["axolotl-module"]
EXPECTED["axolotl-train"] = {
    **EXPECTED["lora.yml"],
    "batch": {"size": 8, "micro": 4},
    "optim": {**EXPECTED["lora.yml"]["optim"], "lr": 0.0001},
}
