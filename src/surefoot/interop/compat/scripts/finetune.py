#!/usr/bin/env python3
"""`finetune.py` of LLM-Adapters and DoRA: the same flags, and `from finetune import train` with the same keywords."""

import sys
from typing import Any

from surefoot.commands.main import main
from surefoot.commands.run import call_training
from surefoot.commands.translate import reading_options
from surefoot.interop.finetune import from_keywords


def train(
    base_model: str = "",
    data_path: str | None = None,
    output_dir: str | None = None,
    adapter_name: str | None = None,
    **settings: Any,
) -> None:
    """The arguments are the flags without their dashes; None is the default. Raises
    surefoot.system.errors.SurefootError."""
    own = {"base_model": base_model, "data_path": data_path, "output_dir": output_dir, "adapter_name": adapter_name}
    given = {name: value for name, value in {**own, **settings}.items() if value is not None}
    words = ["finetune.py", *(f"--{name}={value}" for name, value in given.items())]
    call_training(lambda: from_keywords(given, reading_options()), words)


if __name__ == "__main__":
    main(["run", "--", "finetune.py", *sys.argv[1:]])
