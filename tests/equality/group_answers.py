"""One batch of answers to two prompts, as plain numbers: what TRL's losses and surefoot's are asked about."""

GROUP = 3
LIMIT = 6  # longest answer in tokens
KL = 0.07
REWARDS = [1.0, 0.0, 0.25, 2.0, 2.0, -1.0]  # group by group
# Log-probabilities of each answer's tokens: under the policy, when they were drawn, and under the reference.
POLICY = [
    [-1.2, -0.3, -2.0],
    [-0.7, -1.9, -0.2, -3.1, -0.4],
    [-2.2],
    [-0.1, -0.2, -0.9, -1.1],
    [-1.0, -1.5],
    [-0.6] * 6,
]
DRAWN = [[-1.3, -0.3, -1.5], [-0.9, -1.2, -0.2, -3.5, -0.4], [-2.0], [-0.1, -0.6, -0.9, -1.0], [-1.4, -1.4], [-0.9] * 6]
REFERENCE = [
    [-1.0, -0.5, -2.0],
    [-0.7, -1.9, -0.4, -3.0, -0.9],
    [-2.5],
    [-0.3, -0.2, -0.8, -1.1],
    [-1.0, -1.2],
    [-0.7] * 6,
]
CASES = {  # name -> loss, clip_low, clip_high, kl
    "grpo": ("grpo", 0.2, 0.2, 0.0),
    "grpo with a penalty": ("grpo", 0.1, 0.3, KL),
    "bnpo": ("bnpo", 0.2, 0.2, 0.0),
    "dr_grpo": ("dr_grpo", 0.2, 0.2, KL),
    "dapo": ("dapo", 0.2, 0.28, 0.0),
    "cispo": ("cispo", None, 0.3, 0.0),
    "gspo": ("gspo", 0.05, 0.05, 0.0),
    "rloo": ("rloo", 0.2, 0.2, 0.0),
}
# What an engine found of the tokens that it drew, under the weights of DRAWN, and the bounds of a correction by it.
ENGINE = [
    [-1.3, -0.4, -3.0],
    [-0.9, -1.2, -0.1, -3.5, -2.4],
    [-2.0],
    [-0.1, -1.9, -0.9, -1.0],
    [-1.4, -0.3],
    [-0.9, -0.9, -0.7, -0.9, -0.9, -1.6],
]
BOUNDS = (0.5, 2.0)
CORRECTED = {  # name -> case, correction
    f"{case}, {kind}": (case, kind)
    for case in ("dapo", "grpo with a penalty", "gspo", "cispo")
    for kind in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
}
