"""A member of the run that sends something else than its own contribution, or one that looks at nothing it is sent.

python -m tests.swarm.programs.hostile_peer train ...        in the environment HOSTILE=<one of tests/swarm/attacks.py>,
                                                             or UNGUARDED=yes
The rest of it is honest, so it is met like everybody else.
"""

from __future__ import annotations

import os
from functools import partial

from peer import build, membership
from peer.cli import main
from peer.config import Exchange
from tests.swarm.attacks import Attack, Hostile, Unguarded

if __name__ == "__main__":
    if "HOSTILE" in os.environ:
        build.codec = lambda name, numel: Hostile(Attack(os.environ["HOSTILE"]))
    if "UNGUARDED" in os.environ:
        membership.Guard = partial(Unguarded, Exchange().max_norm_ratio)  # type: ignore[misc, assignment]
    main()
