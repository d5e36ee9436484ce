"""Findings as tables and lines: on the screen, in Markdown, in the report."""
