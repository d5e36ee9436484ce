"""`surefoot tune`: find the fastest settings of a run by short real trials."""
