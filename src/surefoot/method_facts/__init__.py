"""What is true of each training method and of each of its losses: one row each, read by all rooms, without torch."""
