"""Environments: what answers a model between its turns. The loop is ours, the environment is the user's."""
