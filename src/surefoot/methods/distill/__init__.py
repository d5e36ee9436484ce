"""Distillation: a student learns a teacher's next-token distributions, on the data's answers or on its own."""
