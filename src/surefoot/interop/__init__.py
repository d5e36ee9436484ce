"""Configs and commands of other tools: translated, with an account of every setting."""
