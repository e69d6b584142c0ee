"""A peer as every other, with inner steps that take a set time (pacer.py).

python -m tests.benchmarks.wan.paced_peer train ...
"""

from __future__ import annotations

import os

import peer.training.replica
from peer.commands.cli import main
from peer.training.boundaries.boundary import Boundary
from tests.benchmarks.wan.drift import Drifting
from tests.benchmarks.wan.pacer import Paced

finish = Boundary.finish


def finished(boundary: Boundary) -> None:
    """The last exchange has ended: nothing of the run is left but the checkpoint and the evaluation."""
    finish(boundary)
    inner = boundary.state.inner
    assert isinstance(inner, Paced)
    inner.pacer.over()


if __name__ == "__main__":
    peer.training.replica.InnerLoop = Drifting if "DRIFT" in os.environ else Paced  # type: ignore[misc]
    Boundary.finish = finished  # type: ignore[method-assign]
    main()
