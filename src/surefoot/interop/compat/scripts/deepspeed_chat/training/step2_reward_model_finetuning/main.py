#!/usr/bin/env python3
"""`main.py` of DeepSpeed-Chat's step 2, the reward model, with its flags."""

import sys
from pathlib import Path

from surefoot.commands.main import main

if __name__ == "__main__":
    main(["run", "--", str(Path(__file__).resolve()), *sys.argv[1:]])
