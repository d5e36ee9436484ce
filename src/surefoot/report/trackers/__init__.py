"""Trackers: TensorBoard, W&B, MLflow and Trackio behind one interface. They get the rows of trainer_log.jsonl."""
