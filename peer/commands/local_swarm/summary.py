"""The figures of a local swarm at its end: ``summary.json`` and a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from peer.commands.local_swarm.tail import Tail
from peer.config.schema import Config
from peer.data.open import corpus_of, validation
from peer.device.accelerator import pick_device, wants_bf16
from peer.device.memory import is_out_of_memory
from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.replica import model
from peer.replica.averaging import MeanWeights
from peer.replica.inner_loop import mean_loss_by_rows
from peer.rounds.types import Outcome
from peer.training.checkpoint import UNTRAINED_PART, WEIGHTS_PART, Checkpoints, Tensors

log = get_logger("swarm")


def summarize(config: Config, tails: Sequence[Tail], wall_seconds: float) -> dict[str, Any]:
    """The object in ``summary.json``; peer/commands/README.md lists its keys. ``wall_seconds``: of a resumed run, with
    the rounds before.
    """
    peers = {tail.name: tail.summary() for tail in tails}
    losses = [row["val_loss"] for row in peers.values() if row["val_loss"] is not None]
    seconds = sum(tail.seconds for tail in tails)
    averaged, spread = _averaged_model(config, tails)
    return {
        "peers": peers,
        "swarm": {
            "method": config.run.outer.name,
            "peers": len(peers),
            "tokens": sum(row["tokens"] for row in peers.values()),
            "val_loss_mean": mean(losses) if losses else None,
            "val_loss_worst": max(losses) if losses else None,
            "val_loss_averaged_model": averaged,
            "spread": spread,
            "idle_share": sum(tail.idle_seconds for tail in tails) / seconds if seconds else None,
            "bytes_sent": sum(row["bytes_sent"] for row in peers.values()),
            "wall_seconds": wall_seconds,
        },
    }


def in_words(summary: dict[str, Any]) -> str:
    peers, swarm = summary["peers"], summary["swarm"]
    first = [row["first_val_loss"] for row in peers.values() if row["first_val_loss"] is not None]
    total = sum(sum(row["rounds"].values()) for row in peers.values())
    merged = sum(row["rounds"][Outcome.MERGED] for row in peers.values())
    lines = [
        f"{swarm['peers']} peers trained on {swarm['tokens']:,} tokens "
        f"in {swarm['wall_seconds']:.0f} s by {swarm['method']}."
    ]
    if first and swarm["val_loss_mean"] is not None:
        averaged = swarm["val_loss_averaged_model"]
        gap = f"{swarm['val_loss_mean'] / averaged - 1:+.2%}" if averaged else ""
        of_average = f", average of all peers' weights {averaged:.3f}: the mean is {gap} from it" if averaged else ""
        lines.append(
            f"Validation loss: {mean(first):.3f} at the start, {swarm['val_loss_mean']:.3f} at the end "
            f"(worst peer {swarm['val_loss_worst']:.3f}{of_average})."
        )
    if total:
        partners = [len(row["partners"]) for row in peers.values()]
        lines.append(
            f"{merged} of {total} rounds merged with a partner; each peer met {min(partners)} to {max(partners)} "
            f"different ones, waited {swarm['idle_share'] or 0:.1%} of its time "
            f"and sent {swarm['bytes_sent'] / len(peers) / 2**20:.1f} MiB."
        )
    if swarm["spread"] is not None:
        lines.append(f"Spread of the replicas: {swarm['spread']:.2g} (standard deviation of a weight).")
    return "\n".join(lines)


def _averaged_model(config: Config, tails: Sequence[Tail]) -> tuple[float | None, float | None]:
    """Validation loss of the mean of all replicas, and their spread √(Σᵢ‖θᵢ − θ̄‖² / (N · numel)).

    It reads the newest checkpoints, one after the other. What is not trained is that of the first peer.
    """
    folders = [tail.folder / "checkpoints" for tail in tails]
    average = MeanWeights()
    for folder in folders:
        weights = _tensors(folder, WEIGHTS_PART)
        if not weights:
            return None, None
        average.add(weights)
    square = sum(average.square_distance(_tensors(folder, WEIGHTS_PART)) for folder in folders)
    numel = sum(value.numel() for value in average.tensors.values())
    whole = {**_tensors(folders[0], UNTRAINED_PART), **average.tensors}
    return _loss(config, whole), (square / (len(folders) * numel)) ** 0.5


def _loss(config: Config, tensors: Tensors) -> float | None:
    """``None``, and a line that says why, where data, model or memory are missing now: the other figures are here."""
    try:
        network = model.build(config.run)
        network.load_state_dict(tensors, strict=False)
        batches, device = validation(config.run, corpus_of(config.run).validation), pick_device(config.peer.device)
        bf16 = wants_bf16(config.peer.precision, device)  # as the peers evaluate, so that the losses can be compared
        return mean_loss_by_rows(network.to(device), batches, device, autocast=bf16)
    except (UserError, RunError) as error:
        why = str(error)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        why = "the accelerator has no memory left"
    log.warning("the average of the peers' weights is not evaluated: %s", why)  # print fails when its reader has gone
    return None


def _tensors(folder: Path, part: str) -> Tensors:
    """One file of the newest checkpoint whose weights are undamaged; empty when it is missing."""
    saved = Checkpoints(folder, keep=1).newest(parts={WEIGHTS_PART, part})
    return saved.tensors.get(part, {}) if saved else {}
