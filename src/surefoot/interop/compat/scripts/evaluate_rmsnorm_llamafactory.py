#!/usr/bin/env python3
"""Activations and norms at the first position against the others: `surefoot evaluate norms`."""

import sys

from surefoot.commands.main import main

if __name__ == "__main__":
    main(["run", "--", "evaluate_rmsnorm_llamafactory.py", *sys.argv[1:]])
