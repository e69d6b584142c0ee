"""Optional: sends the reported values to TensorBoard or Weights & Biases (``peer.trackers``).

pip install "noloco-peer[tensorboard]"     events in <run.dir>/<peer name>/tensorboard
pip install "noloco-peer[wandb]"           project: the run's name; WANDB_API_KEY, WANDB_MODE=offline as always

Steps are the swarm's inner steps. ``tokens`` is logged with each value, as another x-axis. A peer repeats steps after a
crash, and all of them when it begins anew: then TensorBoard's folder is moved aside, and W&B has both in one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from peer import clock
from peer.errors import RunError, UserError, one_line
from peer.logs import get_logger

log = get_logger("trackers")

TRACKER_SECONDS = 60.0  # to close
REFUSALS = {"UsageError", "AuthenticationError"}  # classes of wandb.errors: no key, a wrong one, a name that is none
TENSORBOARD = "tensorboard"  # the tracker's name, and its folder in the peer's


class Tracker(Protocol):
    """Takes values by name, for example ``train/loss``."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files that ``tensorboard --logdir`` reads."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run a peer; a resumed peer continues its run. ``peer_id`` distinguishes peers with the same name."""

    def __init__(self, folder: Path, run: str, peer: str, peer_id: str) -> None:
        import wandb

        self._run = wandb.init(
            project=run,
            name=peer,
            id=f"{peer}-{peer_id[-8:]}",
            group=run,
            dir=str(folder),
            resume="allow",
            reinit="create_new",  # else it is the program's own, and gets our values, axes and end
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})  # W&B drops the values of an own step below its last one

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """All trackers of the configuration. One that fails is logged and dropped; training continues."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Log the ``values`` that are finite numbers."""
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._each(lambda tracker: tracker.log(step, finite), "failed and is dropped")

    def close(self) -> None:
        """Flush and close. Each has a minute: without its service W&B tries again for ever."""
        self._each(lambda it: clock.result(clock.worker("tracker").submit(it.close), TRACKER_SECONDS), "did not close")

    def _each(self, call: Callable[[Tracker], None], failure: str) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - any error of the library; it must not stop the training
                log.warning("%s %s: %s", type(tracker).__name__, failure, str(error) or "no answer")
                self._trackers.remove(tracker)


def start(names: Sequence[str], folder: Path, *, run: str, peer: str, peer_id: str) -> Trackers:
    """Start the trackers ``names``. Raises :class:`UserError` when one is not installed or refuses its key, and
    :class:`RunError` when one does not start: its servers may be away, and a peer that is a service tries again.
    """
    started: list[Tracker] = []
    for name in names:
        try:
            if name == TENSORBOARD:
                started.append(TensorBoard(folder / name))
            else:
                started.append(WeightsAndBiases(folder, run, peer, peer_id))
        except ImportError:
            how = f'pip install "noloco-peer[{name}]", or leave it out'
            raise UserError(f"peer.trackers: {name} is not installed; {how}") from None
        except Exception as error:  # noqa: BLE001 - any error of the library: no account, no network
            said = f"peer.trackers: {name} does not start: {one_line(error, 200)}"
            if REFUSALS & {it.__name__ for it in type(error).__mro__}:
                raise UserError(f"{said}; correct this, or leave it out") from None
            raise RunError(f"{said}; start again, or leave it out") from None
    return Trackers(started)
