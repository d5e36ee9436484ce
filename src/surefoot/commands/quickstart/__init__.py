"""`surefoot quickstart`: the embedded model and its data; offline."""
