"""Chat templates, which are a stranger's code: rendered within limits, and taken apart so that answers are known."""
