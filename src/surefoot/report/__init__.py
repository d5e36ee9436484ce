"""What users see of a run: console, logs, HTML, cards, pictures, trackers."""
