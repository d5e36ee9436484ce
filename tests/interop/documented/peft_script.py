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
