"""The picture of the convergence benchmark: loss against tokens, and final loss against bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

COLORS = {
    "ddp": "black",
    "noloco_h50": "tab:blue",
    "noloco_h25": "tab:cyan",
    "diloco_h50": "tab:red",
    "diloco_h100": "tab:orange",
    "decoupled": "tab:green",
    "averaging_h50": "tab:purple",
    "one_worker": "tab:brown",
    "local": "tab:gray",
}


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write a PNG of the runs with 8 replicas, means over the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    curves, final = figure.subplots(1, 2)
    for label, color in COLORS.items():
        same = [row for row in rows if row["label"] == label and row["replicas"] == 8]
        if not same:
            continue
        tokens = [point[0] / 1e6 for point in same[0]["curve"]][1:]
        losses = [mean(values) for values in zip(*([p[1] for p in row["curve"]] for row in same), strict=True)][1:]
        curves.plot(tokens, losses, color=color, label=label.replace("_", " "), linewidth=1.3, marker=".", markersize=3)
        sent = mean(row["bytes_per_peer"] for row in same) / 2**20
        final.scatter(max(sent, 0.1), losses[-1], color=color, s=28, zorder=3)
        final.annotate(
            label.replace("_", " "), (max(sent, 0.1), losses[-1]), fontsize=8, xytext=(4, 4), textcoords="offset points"
        )
    curves.set(xlabel="tokens of all replicas, millions", ylabel="validation loss, mean of the replicas")
    curves.legend(frameon=False, fontsize=8)
    final.set(xlabel="MiB sent by a peer (0.1: nothing)", ylabel="validation loss at the end", xscale="log")
    for axes in (curves, final):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
