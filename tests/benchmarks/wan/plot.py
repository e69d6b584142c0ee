"""The picture of the wan benchmark: loss against seconds by model, and idle shares by method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {
    "noloco": "tab:cyan",
    "noloco_int4": "tab:purple",
    "noloco_overlap": "tab:blue",
    "diloco": "tab:red",
    "torchft_diloco": "tab:orange",
    "hivemind_optimizer": "tab:brown",
}


def plot(found: dict[str, dict[str, dict[str, Any]]], file: Path) -> None:
    """Write a PNG with a row for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6 * len(found)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(found), 2, squeeze=False)
    for (stage, runs), (curves, bars) in zip(found.items(), rows, strict=True):
        for name, run in runs.items():
            seconds, losses = zip(*run["losses"], strict=True)
            curves.plot(seconds, losses, color=COLORS[name], label=name.replace("_", " "), linewidth=1.3)
        curves.set(title=stage, xlabel="seconds", ylabel="training loss, mean of the peers")
        curves.legend(frameon=False, fontsize=8)
        names = list(reversed(runs))
        shares = [100 * runs[name]["idle_share"] for name in names]
        drawn = bars.barh([name.replace("_", " ") for name in names], shares, color=[COLORS[name] for name in names])
        bars.bar_label(drawn, fmt="%.1f", padding=3, fontsize=8)
        bars.set(title=stage, xlabel="share of the time that peers are idle, %")
        for axes in (curves, bars):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
