"""Groups of everyone in virtual time, on lines on which they once hindered themselves."""

from __future__ import annotations

from peer.swarm.grouping.roster import GATHER_PROTOCOL
from tests.simulated.network import Connection
from tests.simulated.scenario import Fault, Machine, Scenario
from tests.simulated.world import in_a_folder

COUNT = 8


def gathering(link: Connection) -> int:
    """Open streams between two peers; each has two directions."""
    return sum(pipe.protocol == GATHER_PROTOCOL and not pipe.closed for pipe in link.streams) // 2


def test_a_leader_on_a_slow_line_sends_a_member_one_notice_at_a_time() -> None:
    """It sent one more every two seconds while the earlier ones were on their way: they filled the line."""
    machine = Machine(0.5, latency=0.02, up=1e6, down=1e6, skew=0.0, starts=0.0)
    slow = tuple(Fault(30.0, "trickle", (number,), 60.0, 0) for number in range(COUNT))
    scenario = Scenario(0, "group", (machine,) * COUNT, slow, 120.0, inner_steps=10, numel=300, codec="none")
    seen = []
    with in_a_folder(scenario) as world:

        def look() -> None:
            seen.extend(gathering(link) for peer in world.peers for link in peer.host.links.values())
            world.loop.call_later(0.5, look)

        world.loop.call_later(1.0, look)
        world.run()
    assert max(seen) <= 3  # a notice each way, and a join; there were 5
