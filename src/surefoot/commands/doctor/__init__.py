"""`surefoot doctor`: find what makes a machine or a run slow or wrong."""
