"""`plot_loss` under the name, with its one t, that LLaMA-Factory gives it."""

from collections.abc import Sequence
from pathlib import Path

from surefoot.report.pictures.plots import draw_history


def plot_loss(save_dictionary: str, keys: Sequence[str] = ("loss",)) -> None:
    """Draw training_<key>.png in a run's folder from its trainer_state.json."""
    written, missing = draw_history(Path(save_dictionary), list(keys))
    for key in missing:
        print(f"No metric {key} to plot.")
    for name in written:
        print(f"Figure saved at: {Path(save_dictionary) / name}")
