"""Gives each inner step a set time, as on an accelerator of its own, and measures what the rest of a run takes.

It is the one ruler of this benchmark: the same code paces and measures our peers (paced_peer.py) and those of the other
libraries (reference.py). A step is forward, backward and the local optimizer's update; the rest of its set time passes
in sleep, with the cores free. Hooks of the local optimizer time the update: the time for which a library waits before
or after it is none of the step's.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from peer.replica.inner_loop import InnerLoop


class Pacer:
    """``pace``: seconds of an inner step. The time by which this machine wakes it too late is taken from the next step,
    as an accelerator does whose queue has not run empty. What passes between two steps is not.
    """

    def __init__(self, pace: float, file: Path) -> None:
        self._pace, self._file = pace, file
        self._begin = self._pause = self._late = self._work = 0.0
        self._first: float | None = None
        self._overran = 0
        self.ends: list[float] = []
        self.losses: list[float] = []

    def begin(self) -> None:
        """An inner step starts."""
        self._begin = time.monotonic()
        self._first = self._first if self._first is not None else self._begin

    def computed(self) -> None:
        """The gradient is there."""
        self._pause = time.monotonic()

    def updates(self) -> None:
        """The local optimizer begins its update."""
        if self._first is not None:
            self._begin += time.monotonic() - self._pause

    def end(self) -> None:
        """The step's arithmetic is done. (hivemind makes an update of zeros before the first step.)"""
        if self._first is None:
            return
        now, due = time.monotonic(), self._begin - self._late + self._pace
        self._work += now - self._begin
        self._overran += now > due
        time.sleep(max(0.0, due - now))
        self.ends.append(time.monotonic())
        self._late = min(max(0.0, self.ends[-1] - due), self._pace)

    def over(self, **more: Any) -> None:
        """Training is over, the last exchange included: write all figures. Times are of the machine's one clock."""
        first = self._first or time.monotonic()
        told = {
            "pace": self._pace,
            "first": first,
            "over": time.monotonic(),
            "ends": self.ends,
            "losses": self.losses,
            "work": self._work,
            "overran": self._overran,
        }
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(json.dumps({**told, **more}), encoding="utf-8")
        temporary.replace(self._file)


class Paced(InnerLoop):
    """``PACE`` and ``PACER_FILE`` in the environment."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.pacer = Pacer(float(os.environ["PACE"]), Path(os.environ["PACER_FILE"]))
        self.optimizer.register_step_pre_hook(lambda *_: self.pacer.updates())
        self.optimizer.register_step_post_hook(lambda *_: self.pacer.end())

    def _train_step(self, batch: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        self.pacer.begin()
        done = super()._train_step(batch, rate)
        self.pacer.losses.append(float(done[0]))
        return done

    def _update(self, rate: float) -> None:
        self.pacer.computed()
        super()._update(rate)
