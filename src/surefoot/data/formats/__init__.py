"""Record formats: small pure functions from a record to a conversation.

A conversation is what templates understand: turns of system, user, assistant and tool, or one text. Nothing is
repaired: a missing field, a null, a number where text belongs, an empty answer or turns out of order are faults of the
data, named with file, line, row, turn and field. A blank system text counts as none.
"""

from surefoot.data.formats.conversation import Conversation, ToolCall, Turn
from surefoot.data.formats.custom import convert_with
from surefoot.data.formats.fields import RowFault, each_row
from surefoot.data.formats.layouts import (
    LAYOUTS,
    convert,
    forms,
    recognise,
    unused_fields,
)
from surefoot.data.formats.preferences import kind_of_record, layout_of
from surefoot.data.formats.tags import retag

__all__ = [
    "LAYOUTS",
    "Conversation",
    "RowFault",
    "ToolCall",
    "Turn",
    "convert",
    "convert_with",
    "each_row",
    "forms",
    "kind_of_record",
    "layout_of",
    "recognise",
    "retag",
    "unused_fields",
]
