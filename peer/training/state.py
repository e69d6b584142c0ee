"""The whole state of a peer: for a checkpoint, a resume and a newcomer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn

from peer.config.digest import canonical, digest_of, first_difference, goes_on
from peer.config.schema import RunConfig
from peer.data.batches import BatchStream
from peer.device.accelerator import random_state, set_random_state
from peer.outer.method import OuterMethod
from peer.replica.inner_loop import InnerLoop
from peer.replica.model import parameter_count
from peer.training.checkpoint import NEW_RUN_ADVICE, PUSH_COPIES, UNTRAINED_PART, WEIGHTS_PART, Saved, Tensors
from peer.training.outer_state import OuterState

BEGIN_ANEW_ADVICE = "choose another run.dir or peer.name, or set peer.checkpoint.resume: false to begin anew"


class PeerState(OuterState):
    """Adds the inner loop, the data stream and the random generators. ``config``: digest of the run; ``origin``: its
    run and model in words, from which ``export`` makes a folder.
    """

    inner: InnerLoop

    def __init__(
        self,
        inner: InnerLoop,
        outer: OuterMethod,
        stream: BatchStream,
        config: str,
        origin: dict[str, Any],
        *,
        feedback: bool = False,
    ) -> None:
        super().__init__(inner, outer, feedback=feedback)
        self.stream = stream
        self._config, self._origin = config, origin

    @property
    def checkpoint_bytes(self) -> int:
        return saved_bytes(self.inner.model, len(self.saved_vectors()), self.inner.moment_count)

    @property
    def push_bytes(self) -> int:
        """What a push keeps on the disk while it runs."""
        return PUSH_COPIES * saved_bytes(self.inner.model)

    def tensors(self) -> Iterator[tuple[str, Tensors]]:
        """A checkpoint's files by name, with live tensors where possible; sharded weights come one file at a time."""
        yield WEIGHTS_PART, self.outer.slow.tensors()
        if untrained := untrained_tensors(self.inner.model):
            # copies: safetensors refuses tensors that share memory, as buffers may
            yield UNTRAINED_PART, {name: value.clone() for name, value in untrained.items()}
        yield "outer", self.saved_vectors()
        yield "optimizer", self.outer.slow.moments(self.inner.optimizer)

    def scalars(self) -> dict[str, Any]:
        """The JSON half of a checkpoint."""
        return {
            "config": self._config,
            "origin": self._origin,
            "layout": self.outer.slow.layout(),
            "untrained": self._untrained_shapes(),
            "inner_step": self.inner.step,
            "position": self.stream.position,
            "cursor": self.stream.cursor,
            **vars(self.counters),
            "rng": _rng(self.inner.device),
        }

    def refusal(self, scalars: dict[str, Any]) -> str:
        """Why a checkpoint cannot be resumed; empty when it can."""
        if scalars["config"] != self._config and (difference := self._difference(scalars)):
            return f"is of another run: {difference}; {BEGIN_ANEW_ADVICE}; to go on with its weights, {NEW_RUN_ADVICE}"
        if self._other_model(scalars):
            return (
                "is of another model: names or shapes of its weights differ; install the version of transformers "
                f"that wrote it, or {BEGIN_ANEW_ADVICE}"
            )
        return ""

    def _other_model(self, scalars: dict[str, Any]) -> bool:
        """Does it lack a tensor of this model, or have one in another shape or place? An older version does not say."""
        layout, untrained = self.outer.slow.layout(), self._untrained_shapes()
        saved = scalars.get("untrained", untrained)
        return scalars.get("layout", layout) != layout or not untrained.items() <= saved.items()

    def _untrained_shapes(self) -> dict[str, str]:
        return {name: str(list(value.shape)) for name, value in untrained_tensors(self.inner.model).items()}

    def _difference(self, scalars: dict[str, Any]) -> str:
        try:
            mine, theirs = (canonical(RunConfig.model_validate(it["run"])) for it in (self._origin, scalars["origin"]))
        except (ValidationError, LookupError, TypeError):  # another version's
            return f"its configuration has the digest {scalars['config']}, this one's {self._config}"
        as_written = digest_of(theirs) == scalars["config"]  # else another version wrote it
        return "" if as_written and goes_on(mine, theirs) else first_difference(mine, theirs)

    def restore(self, saved: Saved) -> None:
        self.outer.slow.take(saved.tensors[WEIGHTS_PART])
        for name, value in untrained_tensors(self.inner.model).items():
            value.copy_(saved.tensors[UNTRAINED_PART][name])
        # copies: the file is mapped until no tensor is of it
        self.outer.slow.take_moments(self.inner.optimizer, saved.tensors["optimizer"], copy=True)
        self.take_outer(saved.tensors["outer"])
        scalars = saved.state
        self.inner.step = scalars["inner_step"]
        self.stream.resume(scalars["position"], scalars["cursor"])
        self.resume_at(scalars)
        self.open_remaining()
        _set_rng(scalars["rng"], self.inner.device)

    def move_to(self, device: torch.device) -> None:
        """Model and optimizer to ``device``, with the same bits. Raises what torch raises when it has no room."""
        slow, optimizer = self.outer.slow, self.inner.optimizer
        moments = slow.moments(optimizer)
        self.inner.model.to(device)
        slow.take_moments(optimizer, moments)

    def forget(self) -> None:
        self.outer.slow.take_moments(self.inner.optimizer, {})


def saved_bytes(model: nn.Module, vectors: int = 0, moments: int = 0) -> int:
    """Size of the model, θ in fp32 and what is not trained; of a checkpoint with so many ``vectors`` of the outer step,
    and with ``moments``: the number of all elements that the optimizer keeps.
    """
    untrained = sum(value.nbytes for value in untrained_tensors(model).values())
    return 4 * ((1 + vectors) * parameter_count(model) + moments) + untrained


def untrained_tensors(model: nn.Module) -> Tensors:
    """What a model keeps beside its trained parameters: frozen parameters and persistent buffers. Live tensors."""
    kept = model.state_dict(keep_vars=True)  # it leaves out the buffers that are computed again
    tensors = (*model.named_parameters(), *model.named_buffers())  # tied ones once
    return {name: value.detach() for name, value in tensors if name in kept and not value.requires_grad}


def _rng(device: torch.device) -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": [version, list(internal), gauss],
        "numpy": [numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]],
        device.type: random_state(device),
    }


def _set_rng(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8, device="cpu"))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key, position = state["numpy"]
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, 0, 0.0))
    set_random_state(device, state.get(device.type))  # absent when it was saved with another kind of device
