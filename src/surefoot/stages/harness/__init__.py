"""`surefoot evaluate harness`: an opened model under lm-evaluation-harness."""
