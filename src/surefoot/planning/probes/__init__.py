"""Short measurements on this machine for the plan."""
