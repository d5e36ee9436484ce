"""Facts of LLaMA-Factory's dataset_info.json, the description of the data sets of a folder.

Source: data/README.md of hiyouga/LLaMA-Factory.
"""

from __future__ import annotations

from collections.abc import Mapping

FORMATS: Mapping[str, str] = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
"""Value of `formatting` -> record format."""
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system"}
_DIALOGUE = {"system": "system", "tools": "tools", "images": "images"}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {**_ALPACA, "images": "images"},
    "sharegpt": {"messages": "conversations", **_DIALOGUE},
    "messages": {"messages": "messages", **_DIALOGUE},
}
"""Record format -> {column of the description: field of the format}."""
PAIR: Mapping[str, str] = {"chosen": "chosen", "rejected": "rejected"}
VERDICT: Mapping[str, str] = {"kto_tag": "label"}
OPENAI_TAGS: Mapping[str, str] = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "tool_calls",
    "system_tag": "system",
}
"""Tags of records that are written as OpenAI's messages."""
