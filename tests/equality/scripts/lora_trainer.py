"""A script of the usual kind around transformers' Trainer, with an adapter and accumulated batches."""

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

MODEL_NAME = "models/llama3"
MAX_LENGTH = 128

tokenizer = AutoTokenizer.from_pretrained(MODEL_NAME)
tokenizer.pad_token = "<|finetune_right_pad_id|>"
model = AutoModelForCausalLM.from_pretrained(MODEL_NAME)
model = get_peft_model(
    model,
    LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], bias="none", task_type="CAUSAL_LM"
    ),
)


def tokenize(record):
    return tokenizer(record["text"] + tokenizer.eos_token, truncation=True, max_length=MAX_LENGTH)


dataset = load_dataset("json", data_files="data/texts.jsonl", split="train").map(tokenize, remove_columns=["text"])

training_args = TrainingArguments(
    output_dir="out/lora",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    num_train_epochs=4,
    learning_rate=3e-4,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    weight_decay=0.01,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    bf16=False,
    fp16=False,
    use_cpu=True,
)

trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=dataset,
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)

if __name__ == "__main__":
    trainer.train()
