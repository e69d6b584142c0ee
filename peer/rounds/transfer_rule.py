"""How long a transfer between peers may take. Pure.

A transfer is judged a few times while it runs, by the bytes since the last look (p2p/deadline.py). It goes on while it
will be done in time at that rate, so its limit bounds what a partner that trickles costs and not the size of a model.
"""

from __future__ import annotations

CHECKS = 4  # looks at a transfer within its limit: the first at a quarter of it
UNSEEN_PHASE_SECONDS = 30.0  # seconds that are assumed for an inner phase before the first inner step
LEAST_RATE = 2**20 / 20  # bytes a second (0.42 Mbit/s): what comes more slowly is not worth waiting for
IN_BUFFERS = 2**20  # bytes between two peers that were sent and not read: in sockets, daemons and windows
COPY_RATE = 100e6  # bytes a second at which even a busy machine copies the state that it gives away
CATCH_UP_LEAST = 60.0  # seconds that a group gives each member to take the group's state
LONGEST_REPEAT_PAUSE = 10.0  # seconds until who has lost the last round asks the next donor, while they may repeat it


def swap_limit(stall: float, max_phases: float, phase_seconds: float) -> float:
    """Seconds that a swap may take: ``max_phases`` inner phases of ``phase_seconds`` each (0: unknown). At least a
    ``stall`` for each look, so that a pause of the machine is not taken for a slow line where phases are short.
    """
    return max(CHECKS * stall, max_phases * (phase_seconds or UNSEEN_PHASE_SECONDS))


def state_limit(size: int, least: float) -> float:
    """Seconds that a state of ``size`` bytes may take at ``LEAST_RATE``; a small one ``least``."""
    return max(least, size / LEAST_RATE)


def copy_limit(size: int, least: float) -> float:
    """Seconds until a donor must have copied its state of ``size`` bytes; a small one ``least``."""
    return max(least, size / COPY_RATE)


def catch_up_limit(phase_seconds: float) -> float:
    """Seconds that a group waits for a member that takes the group's state: those of an inner phase.

    A state that takes longer is out of date when it has come.
    """
    return max(CATCH_UP_LEAST, phase_seconds)


def answer_limit(stall: float, sent: int) -> float:
    """Seconds until the other side shows that it reads, after ``sent`` bytes: the buffers hold much of them."""
    return stall + min(sent, IN_BUFFERS) / LEAST_RATE
