"""Record formats: small pure functions from a record to a conversation.

A conversation is what templates understand: turns of system, user, assistant and tool, or one text. Nothing is
repaired: a missing field, a null, a number where text belongs, an empty answer or turns out of order are faults of the
data, named with file, line, row, turn and field. A blank system text counts as none.
"""

from surefoot.data.formats.conversation import IMAGE, Conversation, ToolCall, Turn
from surefoot.data.formats.registry import LAYOUTS, Reader, Seen, conversations_of, kind_of_record, look, recognise
from surefoot.data.formats.rows import RowFault, RowFaults, each_row
from surefoot.data.formats.supervised import retag

__all__ = [
    "IMAGE",
    "LAYOUTS",
    "Conversation",
    "Reader",
    "RowFault",
    "RowFaults",
    "Seen",
    "ToolCall",
    "Turn",
    "conversations_of",
    "each_row",
    "kind_of_record",
    "look",
    "recognise",
    "retag",
]
