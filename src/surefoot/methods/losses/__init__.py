"""The losses as sums over a batch, with the equations and where they come from."""
