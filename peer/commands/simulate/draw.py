"""The picture of a simulation: loss against tokens, spread of the replicas against step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peer.commands.simulate.sampling import SampleRow


def draw(rows: Sequence[SampleRow], file: Path, title: str) -> None:
    """A PNG of 1200 × 480 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    loss, spread = figure.subplots(1, 2)
    tokens = [row["tokens"] / 1e6 for row in rows]
    for key, label in (
        ("val_loss_mean", "mean of the replicas"),
        ("val_loss_worst", "worst replica"),
        ("val_loss_averaged_model", "average of their weights"),
    ):
        loss.plot(tokens, [row[key] for row in rows], label=label, marker=".", markersize=3, linewidth=1.2)
    loss.set(xlabel="tokens of all replicas, millions", ylabel="validation loss, nats a token")
    loss.legend(frameon=False)
    spread.plot([row["time"] for row in rows], [row["spread"] for row in rows], color="tab:purple", linewidth=1.2)
    spread.set(xlabel="inner step", ylabel="spread: standard deviation of a weight")
    for axes in (loss, spread):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
