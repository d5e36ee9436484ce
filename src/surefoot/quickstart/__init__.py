"""The embedded quickstart: a small base model, the world that it was trained on, and questions about that world."""
