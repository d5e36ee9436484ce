"""Write a trained model for other programs, merged and proven equal."""
