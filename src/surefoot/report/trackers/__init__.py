"""Trackers: TensorBoard, W&B, MLflow and Trackio behind one small sink. They get what trainer_log.jsonl gets."""
