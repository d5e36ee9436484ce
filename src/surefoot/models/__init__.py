"""Loading, adapters, generation and saving of models."""
