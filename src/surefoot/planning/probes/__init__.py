"""Short measurements on this machine that the plan asks for."""
