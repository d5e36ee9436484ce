"""Eight question sets, asked and scored as in their papers' code."""
