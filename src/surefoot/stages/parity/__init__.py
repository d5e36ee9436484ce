"""Before step 1: every faster way through the model is held against the plain one, and taken out where they differ."""
