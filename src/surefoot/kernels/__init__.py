"""Arithmetic of our own where it pays: attention of documents, adapters, head and loss; a plain reference beside each."""
