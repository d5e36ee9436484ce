"""surefoot models behind the interface of lm-evaluation-harness."""
