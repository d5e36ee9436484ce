"""Chat templates: rendered in a sandbox, and split so that the tokens of each answer are known."""
