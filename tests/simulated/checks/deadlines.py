"""No transfer outlives its deadline: swaps, rounds of groups, states for newcomers on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from peer.exchange.group import protocol as group_protocol
from peer.exchange.pair import protocol as pair_protocol
from peer.p2p import deadline
from peer.swarm.state_transfer import donor, download
from tests.simulated.loop import PROCESS

if TYPE_CHECKING:
    from tests.simulated.world import World

USERS: tuple[Any, ...] = (pair_protocol, group_protocol, donor, download)
LATE = 1.0  # seconds until what was cancelled has ended


@contextmanager
def watched(world: World) -> Iterator[None]:
    """Within the context each transfer is timed."""

    async def in_time(work: Any, left: Callable[[], Any], limit: float, window: float | None = None) -> Any:
        began, process = world.loop.time(), PROCESS.get()
        try:
            return await deadline.in_time(work, left, limit, window)
        finally:
            took = world.loop.time() - began
            ran = process is not None and not process.dead and process.thawed < began
            if process is not None and ran and took > limit + LATE:
                world.violation(f"{process.name} needs {took:.1f} s for what may take {limit:.1f} s")

    for user in USERS:
        user.in_time = in_time
    try:
        yield
    finally:
        for user in USERS:
            user.in_time = deadline.in_time
