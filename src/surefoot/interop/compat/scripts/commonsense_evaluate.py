#!/usr/bin/env python3
"""The eight commonsense sets, with the flags of LLM-Adapters and DoRA."""

import sys

from surefoot.commands.main import main

if __name__ == "__main__":
    main(["run", "--", "commonsense_evaluate.py", *sys.argv[1:]])
