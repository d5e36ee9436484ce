"""`surefoot board`: a live, read-only local page of the runs in a folder."""
