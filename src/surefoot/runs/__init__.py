"""One run, from config to published folder: prepare, set up, step, save, publish."""
