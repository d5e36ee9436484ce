"""Eight question sets, asked and scored as their papers' code does."""
