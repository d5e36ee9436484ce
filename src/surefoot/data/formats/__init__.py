"""Record formats: pure functions that convert a record to a conversation.

A conversation is the input of templates: turns of system, user, assistant and tool, or one text. Nothing is repaired: a
missing field, a null, a number instead of text, an empty answer or turns in the wrong order raise an error that names
file, line, row, turn and field. A blank system text counts as none.
"""

from surefoot.data.formats.conversation import IMAGE, Conversation, RowFault, ToolCall, Turn
from surefoot.data.formats.registry import (
    LAYOUTS,
    FormatScan,
    Reader,
    conversations_of,
    kind_of_record,
    recognize,
    scan_format,
)
from surefoot.data.formats.supervised import retag

__all__ = [
    "IMAGE",
    "LAYOUTS",
    "Conversation",
    "FormatScan",
    "Reader",
    "RowFault",
    "ToolCall",
    "Turn",
    "conversations_of",
    "kind_of_record",
    "recognize",
    "retag",
    "scan_format",
]
