"""Arithmetic of our own where it pays: documents, adapters, head and loss; a plain reference beside each."""
