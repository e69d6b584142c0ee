"""The model card: what was trained, how, on what and by whom, in the words of the checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from peer import __version__
from peer.commands.export.mixing import Mixed
from peer.commands.export.sources import ExportSource


def card(sources: Sequence[ExportSource], mixed: Mixed, parameters: int, dtype: str) -> str:
    """README.md of the exported folder."""
    first = sources[0]
    run = first.run
    head = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["noloco", run.outer.name]}
    steps = sorted({source.step for source in sources})
    members = frozenset().union(*(source.partners for source in sources), {source.peer for source in sources})
    rows = {
        "run": run.name,
        "method": f"{run.outer.name}, an outer step every {run.inner_steps} inner steps",
        "parameters": f"{parameters:,} ({dtype})",
        "inner steps": " to ".join(f"{step:,}" for step in {steps[0], steps[-1]}) + f" of {run.steps:,}",
        "tokens": f"{sum(source.tokens for source in sources):,} by the exported peers",
        "peers": f"{len(sources)} exported, {len(members)} seen by them",
        "validation loss": "not computed" if mixed.loss is None else f"{mixed.loss:.4f} nats a token",
        "configuration digest": f"`{first.config}`",
        "written by": f"noloco-peer {__version__}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    resolved = yaml.safe_dump({"run": run.model_dump(mode="json")}, sort_keys=False)
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {run.name}\n\n"
        "Trained by peers that exchange their weights over the internet, with noloco-peer.\n\n"
        f"| | |\n|---|---|\n{table}\n\n{_peers(sources, mixed)}"
        f"The weights are the peers' fast weights{', averaged' if len(sources) > 1 else ''}. "
        f"The whole shared configuration:\n\n```yaml\n{resolved}```\n"
    )


def _peers(sources: Sequence[ExportSource], mixed: Mixed) -> str:
    """How far apart the averaged ones were."""
    if len(sources) == 1:
        return ""
    rows = ["| peer | step | tokens | distance to the average | validation loss |", "|---|---|---|---|---|"]
    for place, source in enumerate(sources):
        loss = f"{mixed.losses[place]:.4f}" if mixed.losses else "not computed"
        distance = f"{mixed.distances[place]:.3%}"
        rows.append(f"| {source.peer} | {source.step:,} | {source.tokens:,} | {distance} | {loss} |")
    return "\n".join(rows) + "\n\n"
