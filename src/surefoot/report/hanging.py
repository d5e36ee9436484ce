"""A label and a text that goes on below itself where a line is full, and without blanks at line ends."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_LEAST = 20  # columns of text, however narrow the terminal is


@dataclass(frozen=True)
class Hanging:
    """A renderable. The text may hold line ends of its own; empty lines stay empty."""

    label: Text
    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        indent = self.label.cell_len
        width = max(_LEAST, options.max_width - indent)
        lines = [
            line for part in self.text.split("\n", allow_blank=True) for line in part.wrap(console, width) or [part]
        ]
        for number, line in enumerate(lines):
            line.rstrip()
            yield self.label + line if number == 0 else Text(" " * indent if line else "") + line
