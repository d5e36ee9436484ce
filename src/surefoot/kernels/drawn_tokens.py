"""Log-probabilities of tokens that were drawn at a temperature, as a loss of single positions, and the entropies.

    p = softmax(z / T) over the tokens that could be drawn      l = -log p[y]      dl/dz = (p - e_y) / T

With top-k or top-p some tokens could not be drawn; p is 0 there, and so is their gradient.

Shapes: N positions, n of one part, V vocabulary, M tokens that could be drawn, over all positions.
"""

from __future__ import annotations

import torch

NEVER = -1e30  # log-probability of excluded tokens; unlike -inf, 0 times it is 0


class DrawnTokens:
    """The `TokenLoss` -log p. After a pass with gradients `entropy` [N] has that of p at every position."""

    def __init__(self, targets: torch.Tensor, temperature: float, kept: torch.Tensor | None):
        """targets: [N].
        kept: [2, M], positions, and tokens that could be drawn there; None: every token could.
        """
        self.bound = 2 / temperature
        self.entropy = torch.zeros(len(targets), device=targets.device)
        self._targets, self._temperature, self._kept = targets, temperature, kept

    def __call__(
        self, logits: torch.Tensor, part: slice, wanted: bool, narrow: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        words = self._targets[part].unsqueeze(1)
        if self._temperature != 1:
            logits.div_(self._temperature)
        if self._kept is not None:
            logits.masked_fill_(self._left_out(part.start, logits), NEVER)
        log_p = torch.log_softmax(logits, dim=1, out=logits)  # pyright: ignore[reportCallIssue]
        chosen = log_p.gather(1, words)
        if not wanted:
            return -chosen.squeeze(1), None
        p = log_p.exp()
        self.entropy[part] = -torch.linalg.vecdot(p, log_p)
        p.scatter_(1, words, chosen.exp() - 1)
        return -chosen.squeeze(1), p if self._temperature == 1 else p.div_(self._temperature)

    def _left_out(self, start: int, logits: torch.Tensor) -> torch.Tensor:
        """Mark the tokens of the positions from `start` on that could not be drawn, [n, V]."""
        assert self._kept is not None
        rows = len(logits)
        left_out = torch.ones(rows + 1, logits.shape[1], dtype=torch.bool, device=logits.device)
        places, tokens = self._kept[0] - start, self._kept[1]
        # Those of other parts go into a row of their own: to select by a condition, a GPU would have to be waited for.
        left_out[places.where((places >= 0) & (places < rows), rows), tokens] = False
        return left_out[:rows]
