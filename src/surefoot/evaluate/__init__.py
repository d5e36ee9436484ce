"""Measure finished models: loss, reward accuracy, commonsense sets, harness tasks, norms, captures."""
