#!/usr/bin/env python3
"""The old name of e2e_rlhf.py."""

import sys

from e2e_rlhf import run_all  # pyright: ignore[reportMissingImports]  # it lies beside this file

if __name__ == "__main__":
    sys.exit(run_all(sys.argv[1:]))
