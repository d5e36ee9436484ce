"""What is wrong with this machine, or with a run before it is one: measured, named by a code, with what to do."""
