"""A model of ours behind the interface of lm-evaluation-harness."""
