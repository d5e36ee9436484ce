"""The schema of a run's config, and how YAML, overrides and Python values are read into it."""
