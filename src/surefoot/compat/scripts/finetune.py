#!/usr/bin/env python3
"""`finetune.py` of LLM-Adapters and DoRA: the same flags, and `from finetune import train` with the same keywords."""

import sys
from typing import Any

from surefoot.cli.main import main


def train(**settings: Any) -> None:
    """The keyword arguments are the flags without their dashes. Ends with SystemExit where the command would fail."""
    words = [f"--{name}={value}" for name, value in settings.items() if value is not None]
    try:
        main(["run", "--", "finetune.py", *words])
    except SystemExit as ending:
        if ending.code:
            raise


if __name__ == "__main__":
    main(["run", "--", "finetune.py", *sys.argv[1:]])
