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
