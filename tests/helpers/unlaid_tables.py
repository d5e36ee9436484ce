"""Write the tables of a plan into run.log without laying them out: the same words, one line a row, in no time.

    with unlaid_tables():
        main(["train", "run.yaml"])

What is printed is laid out. tests/report tests the layout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from surefoot.report import console


@contextmanager
def unlaid_tables() -> Iterator[None]:
    laid_out = console.as_plain_text

    def text(renderable: Any) -> str:
        if isinstance(renderable, Group):
            return "\n".join(map(text, renderable.renderables))
        if isinstance(renderable, Table):
            rows = zip(*([column.header, *column.cells] for column in renderable.columns), strict=True)
            return "\n".join("  ".join(map(str, row)) for row in rows)
        return renderable.plain if isinstance(renderable, Text) else laid_out(renderable)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "as_plain_text", text)
        yield
