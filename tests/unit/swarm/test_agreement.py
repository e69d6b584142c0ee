"""The one meeting that a peer has agreed on, and what ends it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.p2p.event_loop import LoopThread
from peer.p2p.stream import StreamLost
from peer.rounds.progress import Progress
from peer.swarm.context import BoundaryClock, SwarmContext
from peer.swarm.pairing.agreement import Accept, Agreement, PartnerReady
from tests.unit.virtual import stream_pair, virtual_time


@pytest.mark.parametrize("step", ["end_run", "end_swaps"])
def test_who_has_made_its_last_inner_step_or_swap_calls_off_the_meeting_of_before(step: str) -> None:
    """The one was agreed with a peer that may still train, and whose contribution would not be the plain mean's; to the
    other one this peer would not come.
    """
    with virtual_time():
        thread = LoopThread()
        mine, theirs = thread.call(stream_pair(), 5)
        boundary = BoundaryClock(Progress())
        context = SimpleNamespace(node=SimpleNamespace(background=asyncio.ensure_future), boundary=boundary)

        async def work() -> None:
            agreement = Agreement(cast("SwarmContext", context))
            agreement.commit(mine, "partner", Accept(eta=1.0))
            meeting: Any = agreement.meeting
            getattr(agreement, step)()
            assert (boundary.run_ended, boundary.swaps_ended) == (step == "end_run", step == "end_swaps")
            assert agreement.meeting is None
            assert meeting.came.result() is False
            try:
                await theirs.receive(PartnerReady, 5)
            except StreamLost:
                return
            raise AssertionError("the partner does not learn it")

        thread.call(work(), 20)
        thread.close()
