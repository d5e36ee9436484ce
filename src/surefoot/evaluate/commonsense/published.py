"""Published accuracies on the eight commonsense sets, to stand beside what is measured here.

In per cent, of models that were fine-tuned on the 170k mixture and asked with four beams. Sources: Hu et al.,
"LLM-Adapters", EMNLP 2023 (its repository's table), and Liu et al., "DoRA", ICML 2024 (its repository's table). Who
repeats them reports swings of several points between seeds, batch sizes and PEFT versions, more than lie between the
two methods.
"""

from __future__ import annotations

from dataclasses import dataclass

LLM_ADAPTERS = "Hu et al. 2023, LLM-Adapters"
DORA = "Liu et al. 2024, DoRA"
ORDER = ("boolq", "piqa", "social_i_qa", "hellaswag", "winogrande", "ARC-Easy", "ARC-Challenge", "openbookqa")


@dataclass(frozen=True)
class PublishedRow:
    """accuracies: per cent, in ORDER. average: as published; lr: learning rate of the fine-tuning."""

    model: str
    method: str
    rank: int
    lr: float
    accuracies: tuple[float, ...]
    average: float
    source: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.method} r {self.rank}"

    def accuracy(self, name: str) -> float:
        return self.accuracies[ORDER.index(name)]


PUBLISHED: tuple[PublishedRow, ...] = (
    PublishedRow("LLaMA-7B", "LoRA", 32, 3e-4, (68.9, 80.7, 77.4, 78.1, 78.8, 77.8, 61.3, 74.8), 74.7, LLM_ADAPTERS),
    PublishedRow("LLaMA-7B", "LoRA", 32, 3e-4, (67.5, 80.8, 78.2, 83.4, 80.4, 78.0, 62.6, 79.1), 76.3, DORA),
    PublishedRow("LLaMA-7B", "DoRA", 16, 2e-4, (70.0, 82.6, 79.7, 83.2, 80.6, 80.6, 65.4, 77.6), 77.5, DORA),
    PublishedRow("LLaMA-7B", "DoRA", 32, 1e-4, (69.7, 83.4, 78.6, 87.2, 81.0, 81.9, 66.2, 79.2), 78.4, DORA),
    PublishedRow("LLaMA2-7B", "LoRA", 32, 3e-4, (69.8, 79.9, 79.5, 83.6, 82.6, 79.8, 64.7, 81.0), 77.6, DORA),
    PublishedRow("LLaMA2-7B", "DoRA", 32, 2e-4, (71.8, 83.7, 76.0, 89.1, 82.6, 83.7, 68.2, 82.4), 79.7, DORA),
    PublishedRow("LLaMA3-8B", "LoRA", 32, 3e-4, (70.8, 85.2, 79.9, 91.7, 84.3, 84.2, 71.2, 79.0), 80.8, DORA),
    PublishedRow("LLaMA3-8B", "DoRA", 16, 1e-4, (74.5, 88.8, 80.3, 95.5, 84.7, 90.1, 79.1, 87.2), 85.0, DORA),
    PublishedRow("LLaMA3-8B", "DoRA", 32, 1e-4, (74.6, 89.3, 79.9, 95.5, 85.6, 90.5, 80.4, 85.8), 85.2, DORA),
)
