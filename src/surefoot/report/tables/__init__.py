"""Findings as tables and lines, for the screen, Markdown and the report."""
