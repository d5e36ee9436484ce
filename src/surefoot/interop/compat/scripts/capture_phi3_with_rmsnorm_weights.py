#!/usr/bin/env python3
"""Matrices, norms and activations of a model as files: `surefoot capture`."""

import sys

from surefoot.commands.main import main

if __name__ == "__main__":
    main(["run", "--", "capture_phi3_with_rmsnorm_weights.py", *sys.argv[1:]])
