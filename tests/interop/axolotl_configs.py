"""Small configs of Axolotl's, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from interop.small_configs import translated
from surefoot.interop.translation import Translation
from surefoot.system.errors import InputError

LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
CHAT = {"datasets": [{"path": "d.jsonl", "type": "chat_template"}]}


def axolotl(**words: Any) -> Translation:
    return translated("axolotl", **words)


def refused(**words: Any) -> set[str]:
    """The settings that are refused."""
    with pytest.raises(InputError) as caught:
        axolotl(**words)
    return {fault.what.partition(":")[0] for fault in caught.value.faults}
