#!/usr/bin/env python3
"""LoRA on Phi-3 with a scaled BOS embedding: the config beside this file, and what it is about."""

import sys
from pathlib import Path

from surefoot.commands.main import main

CONFIG = Path("examples/train_lora/phi3_bos_zero_lora.yaml")

if __name__ == "__main__":
    config = CONFIG if CONFIG.is_file() else Path(__file__).with_name(CONFIG.name)
    print("🚀 Starting Phi-3 BOS Zero LoRA Training")
    print(f"📋 Config: {config}")
    print("🎯 Features:")
    print("   - BOS tokens added to all sequences")
    print("   - Position 0 embeddings scaled (0.0 zeroes them out)")
    print("   - LoRA fine-tuning on all linear layers", flush=True)
    main(["run", "--", "llamafactory-cli", "train", str(config), *sys.argv[1:]])
