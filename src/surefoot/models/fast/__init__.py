"""Fast paths of a model: what is put in for its own modules and computes the same, one file for each."""
