"""Kernels of our own where they pay: packed attention, adapters, head and loss; each with a plain reference."""
