"""`surefoot export`: a trained model in the form that others read, with the proof that it is the same model."""
