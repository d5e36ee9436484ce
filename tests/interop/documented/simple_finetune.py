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
