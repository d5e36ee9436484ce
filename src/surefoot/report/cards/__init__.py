"""What is written beside weights for whoever gets them: model cards and Modelfiles."""
