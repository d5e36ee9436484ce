"""Eight question sets, asked and scored as in the published code."""
