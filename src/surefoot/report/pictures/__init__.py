"""Findings as pictures, PNG or in the report."""
