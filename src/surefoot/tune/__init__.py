"""A measured search for the fastest settings of a run that still compute what the plain path computes."""
