"""The optimizer step, the loop, engines and checkpoints; knows no method, no family, no YAML."""
