"""Facts about each training method and loss, one row each, read by all rooms; needs no torch."""
