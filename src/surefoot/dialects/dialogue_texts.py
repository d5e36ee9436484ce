"""Which of surefoot's templates lays out, as they stand, records whose prompts and answers are texts.

surefoot's readers of preference data turn `\\n\\nHuman: … \\n\\nAssistant:` into turns, so that any template can write
them; a tool that takes such texts as they are is followed by the template that writes the same marks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_template(record: Mapping[str, Any]) -> str | None:
    """raw or human-assistant; None for a record of turns."""
    prompt = record.get("prompt", record.get("chosen"))
    if not isinstance(prompt, str):
        return None
    return (
        "human-assistant" if is_open_dialogue(prompt) or ("prompt" not in record and "\n\nHuman:" in prompt) else "raw"
    )


def is_open_dialogue(prompt: Any) -> bool:
    """Whether a text ends where the assistant begins to write."""
    text = f"\n\n{prompt}" if isinstance(prompt, str) else ""
    return "\n\nHuman:" in text and text.rstrip().endswith("\n\nAssistant:")
