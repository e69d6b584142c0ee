"""The picture of the wan benchmark: how much longer than computing alone each method takes, by stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {
    "noloco_default": "tab:blue",
    "noloco_paper": "tab:cyan",
    "diloco": "tab:red",
    "diloco_fp32": "tab:pink",
    "torchft_buckets": "tab:orange",
    "torchft_best": "tab:olive",
    "torchft_h100": "tab:gray",
    "hivemind": "tab:brown",
}


def plot(table: dict[str, Any], file: Path) -> None:
    """Write a PNG with a panel for each stage; a whisker is from the least to the most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = table["wall_ratio"]
    if not stages:
        return
    figure = Figure(figsize=(11, 2.8 * ((len(stages) + 1) // 2)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots((len(stages) + 1) // 2, 2, squeeze=False).flatten()
    for axes in panels[len(stages) :]:
        axes.set_visible(False)
    for (stage, ratios), axes in zip(stages.items(), panels, strict=False):
        names = [it for it in reversed(COLORS) if it in ratios]
        longer = [100 * (ratios[it] - 1) for it in names]
        ranges = [table["ranges"]["wall_ratio"][stage][it] for it in names]
        spread = [
            [value - 100 * (least - 1) for value, (least, _) in zip(longer, ranges, strict=True)],
            [100 * (most - 1) - value for value, (_, most) in zip(longer, ranges, strict=True)],
        ]
        labels = [it.replace("_", " ") for it in names]
        drawn = axes.barh(labels, longer, xerr=spread, color=[COLORS[it] for it in names], ecolor="0.3")
        axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize=8)
        axes.axvline(2, color="0.5", linestyle=":", linewidth=1)
        axes.set(title=stage.replace("_", ", with a "), xlabel="wall time above computing alone, %")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
