"""What a stage learns from, and so what a record becomes.

answers: one example, whose answers are learned. pairs: two neighbouring examples, the better answer and then the worse,
both behind the same prompt. judged: one example, whose answer is known to be good or bad. prompts: one example that
ends where the model begins to write, with nothing to learn.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["answers", "pairs", "judged", "prompts"]


def rows_per_item(kind: Kind) -> int:
    """Examples that belong together, and of which a step takes all or none."""
    return 2 if kind == "pairs" else 1
