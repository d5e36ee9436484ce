"""Translate configs and commands of other tools, with a note on what became of every setting."""
