"""What is measured of a finished model: losses, scores, norms, and what its layers see."""
