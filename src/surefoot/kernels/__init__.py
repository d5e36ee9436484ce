"""Custom kernels: packed attention, adapters, output head with loss, norms; each with a plain reference."""
