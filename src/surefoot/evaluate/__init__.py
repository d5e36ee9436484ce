"""Measure finished models: loss, scored answers, reward accuracy, commonsense sets, harness tasks, norms, captures."""
