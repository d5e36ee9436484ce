"""Fetch from and push to the Hugging Face hub."""
