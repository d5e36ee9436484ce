"""Full fine-tuning with batches that leave a remainder in every epoch, and a share of the steps to warm up."""

import datasets
import transformers

name = "models/qwen2"
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
model = transformers.AutoModelForCausalLM.from_pretrained(name)
arguments = {"learning_rate": 2e-4, "warmup_steps": 0.3, "lr_scheduler_type": "linear", "weight_decay": 0.1}


def tokenize(record):
    return tokenizer(record["text"] + tokenizer.eos_token)


texts = datasets.load_dataset("json", data_files={"train": "data/texts.jsonl"})["train"]
trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
        "out/full",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=7,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        **arguments,
    ),
    train_dataset=texts.map(tokenize, remove_columns=["text"]),
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
)

if __name__ == "__main__":
    trainer.train()
