"""Logits of a student and a teacher at the same positions: what TRL's losses and surefoot's are asked about."""

POSITIONS, WORDS, KEPT = 7, 19, 4
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
TEMPERATURES = (1.0, 2.5)


def table(stride: int) -> list[list[float]]:
    """POSITIONS rows of WORDS logits between -6 and 6, without a generator."""
    return [
        [((row * 31 + word * stride + row * word * 7) % 97) / 8 - 6 for word in range(WORDS)]
        for row in range(POSITIONS)
    ]


STUDENT, TEACHER = table(13), table(29)
LABELS = [1, -100, 3, 4, -100, 6, 0]  # -100: a position that is not learned
