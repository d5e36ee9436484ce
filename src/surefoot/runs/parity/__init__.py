"""Hold the fast paths against their plain references before step 1."""
