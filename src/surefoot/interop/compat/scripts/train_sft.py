#!/usr/bin/env python3
"""`train_sft.py` with its flags: a plain loop that prints how long forward and backward take."""

import sys

from surefoot.commands.main import main

if __name__ == "__main__":
    main(["run", "--", "train_sft.py", *sys.argv[1:]])
