"""Which checkpoints are exported, what they contain, whether they are of one run, and the average of their weights.

The weights are the fast weights θ, which training evaluates. After an outer step θ = φ. A stop may save a checkpoint
between two outer steps; its θ includes inner steps that φ has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from peer.config.digest import canonical, first_difference
from peer.config.schema import RunConfig
from peer.errors import UserError
from peer.replica.averaging import MeanWeights
from peer.telemetry.run_log import ROUNDS, read_rows
from peer.training.checkpoint import (
    MODEL_PARTS,
    STATE,
    UNTRAINED_PART,
    WEIGHTS_PART,
    Checkpoints,
    Saved,
    Tensors,
    keep_open,
    load,
)


@dataclass(frozen=True)
class ExportSource:
    """One peer's checkpoint. ``partners``: the names of the peers that it has merged with."""

    peer: str
    path: Path
    files: Mapping[str, Path]  # by name, where they stay readable
    step: int
    tokens: int
    config: str  # digest of the run's configuration
    run: RunConfig
    architecture: dict[str, Any]
    generation: dict[str, Any] | None  # settings of the pre-trained source
    partners: frozenset[str]

    def weights(self) -> Tensors:
        """θ by parameter, fp32 on the host; read from disk at every call, so that memory holds few of them."""
        return _load(self.path, self.files).tensors[WEIGHTS_PART]

    def untrained(self) -> Tensors:
        """Frozen parameters and persistent buffers."""
        return _load(self.path, self.files, (UNTRAINED_PART,)).tensors.get(UNTRAINED_PART, {})


def find(paths: Sequence[Path], held: ExitStack) -> list[ExportSource]:
    """The checkpoints that ``paths`` name. Raises :class:`UserError` unless whole, different and of one run.

    They stay readable until the end of ``held``, because a peer that trains removes its older ones.
    """
    named = {path: keep_open(path, held) for path in paths if (path / STATE).is_file()}  # all before one is read
    sources = [_source(_load(path, named[path]) if path in named else _newest(path, held)) for path in paths]
    first = sources[0]
    for index, source in enumerate(sources):
        if any(other.path.resolve() == source.path.resolve() for other in sources[:index]):
            raise UserError(f"{source.path} is given twice")
        # Not the architectures: they name the folder and the transformers of their machine. The run's digest contains
        # that of config.json, and names and shapes are compared when weights are averaged.
        if source.config != first.config:
            difference = first_difference(canonical(first.run), canonical(source.run))
            difference = difference.replace(" here", f" in {first.path}").replace(" there", f" in {source.path}")
            raise UserError(f"the checkpoints are not of one run and cannot be averaged: {difference}")
    return sources


def _newest(path: Path, held: ExitStack) -> Saved:
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    saved = Checkpoints(folder, keep=1).newest(parts=MODEL_PARTS, held=held) if folder.is_dir() else None
    if saved is not None:
        return saved
    if any(folder.glob("step_*")):
        raise UserError(f"{folder}: every checkpoint in it is damaged")
    peers = sorted(str(it.parent) for it in path.glob("*/checkpoints")) if path.is_dir() else []
    if peers:
        raise UserError(f"{path} has several peers' folders, say which: {' '.join(peers)}")
    raise UserError(f"{path}: no checkpoint here; name a folder step_NNN, a peer's folder, or its checkpoints")


def _load(path: Path, files: Mapping[str, Path], parts: Sequence[str] = MODEL_PARTS) -> Saved:
    try:
        return load(path, parts, files)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged: {error}; take another checkpoint of this peer") from None


def _source(saved: Saved) -> ExportSource:
    path, state = saved.path, saved.state
    origin: Any = state.get("origin")
    try:
        run = RunConfig.model_validate(origin["run"])
        step, tokens, config = int(state["inner_step"]), int(state["tokens"]), str(state["config"])
        architecture, generation = dict(origin["architecture"]), origin.get("generation")
    except (ValidationError, KeyError, TypeError, ValueError):
        version = origin.get("version") if isinstance(origin, dict) else None
        raise UserError(f"{path} was written by another version of noloco-peer ({version}); use that one") from None
    home = path.absolute().parent.parent
    merged = [row for row in read_rows(home / ROUNDS) if row.get("outcome") == "merged"]
    before = [row for row in merged if isinstance(row.get("step"), int) and row["step"] <= step]
    partners = [row["partner"] for row in before if isinstance(row.get("partner"), str)]
    return ExportSource(
        peer=home.name,
        path=path,
        files=saved.files,
        step=step,
        tokens=tokens,
        config=config,
        run=run,
        architecture=architecture,
        generation=generation,
        partners=frozenset(name for names in partners for name in names.split(",")),
    )


@dataclass(frozen=True)
class Mixed:
    """``distances`` ‖θᵢ − θ̄‖ / ‖θ̄‖ and ``losses`` by source, ``loss`` of the average; losses only where computed."""

    distances: list[float]
    losses: list[float]
    loss: float | None


def mix(network: nn.Module, sources: Sequence[ExportSource], loss_of: Callable[[nn.Module], float] | None) -> Mixed:
    """Give ``network`` the mean of the weights of ``sources``; of one source, its weights to the bit. What is not
    trained is that of the first source.

    Memory holds the mean, one peer's weights and the network, whatever the number of peers.
    """
    mean = MeanWeights()
    for source in sources:
        mean.add(source.weights())
    distances, losses = [], []
    for source in sources if len(sources) > 1 else ():
        weights = source.weights()
        distances.append((mean.square_distance(weights) / mean.square_norm()) ** 0.5)
        if loss_of is not None:
            _put(network, weights, source)
            losses.append(loss_of(network))
    _put(network, mean.tensors, sources[0])
    return Mixed(distances, losses, None if loss_of is None else loss_of(network))


def _put(network: nn.Module, weights: Tensors, source: ExportSource) -> None:
    """Copy ``weights``, and what ``source`` has not trained, into ``network``. Raises :class:`UserError` when names or
    shapes differ.
    """
    whole = {**source.untrained(), **weights}
    shapes = {name: value.shape for name, value in whole.items()}
    known = {name: value.shape for name, value in (*network.named_parameters(), *network.named_buffers())}
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    if not (shapes.items() <= known.items() and trained <= shapes.keys()):
        raise UserError(f"{source.path}: its weights do not fit the model that its configuration names")
    network.load_state_dict(whole, strict=False)
