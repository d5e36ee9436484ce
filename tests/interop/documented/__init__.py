"""Commands and configs of other tools, as their public documentation writes them, and what each comes to here.

None is copied: each names settings that a guide, a reference or an example of the tool names, with values of its own.

COMMANDS: name -> command (commands.yaml).
FILES: name -> text of the configs and scripts in this folder.
EXPECTED: name of a command or a file -> the surefoot config (expected.yaml).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_HERE = Path(__file__).parent
_OURS = ("__init__.py", "commands.yaml", "expected.yaml")
COMMANDS: dict[str, str] = yaml.safe_load((_HERE / "commands.yaml").read_text())
FILES = {path.name: path.read_text() for path in sorted(_HERE.iterdir()) if path.is_file() and path.name not in _OURS}
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((_HERE / "expected.yaml").read_text())
# A command that names a file means what the file says, but for the words behind it.
EXPECTED["sft_config.yaml"], EXPECTED["lora.yml"] = EXPECTED["trl-config"], EXPECTED["axolotl-module"]
EXPECTED["axolotl-train"] = {
    **EXPECTED["lora.yml"],
    "batch": {"size": 8, "micro": 4},
    "optim": {**EXPECTED["lora.yml"]["optim"], "lr": 0.0001},
}
