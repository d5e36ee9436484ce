"""Data sets on the hub: which files a subset and split are, and their records."""
