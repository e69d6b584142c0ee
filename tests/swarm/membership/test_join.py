"""State transfer between real nodes: donors that leave or have bad weights, and a bootstrap node that answers late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest
import torch

from peer.errors import RunError
from peer.p2p import identity
from peer.p2p.dht.join import DHT_TIMEOUT
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import Node
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import Stream, StreamLost
from peer.rounds.contribution import PART
from peer.rounds.state import NO_ROUNDS, Lineage, State
from peer.rounds.types import Seat
from peer.swarm.directory.directory import Members
from peer.swarm.directory.reader import Reader
from peer.swarm.state_transfer.download import PartialState, download
from peer.swarm.state_transfer.join import take_state
from tests.swarm.support.harness import wait_for
from tests.swarm.support.node_peer import Peer
from tests.unit.parts import context_of

PARTS = 96
NUMEL = PARTS * PART
ME = MemberIdentity("new", "test", "c", "{}", "layout")


def state(value: float, lineage: Lineage = NO_ROUNDS, round: int = 3) -> Callable[[], State]:
    return lambda: State(30, round, [torch.full((NUMEL,), value), torch.full((NUMEL,), -value)], lineage, 2)


class Scene:
    """Two donors and a newcomer."""

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        one: Callable[[], State],
        two: Callable[[], State],
        bulk_port: Literal["auto", "off"] = "auto",
    ) -> None:
        self.one = Peer("one", folder, (), snapshot=one)
        stack.callback(self.one.presence.leave)
        self.two = Peer("two", folder, self.one.node.addresses, snapshot=two)
        stack.callback(self.two.presence.leave)
        key = folder / "new.key"
        identity.load_or_create(key)
        initial = self.two.node.addresses
        settings = NodeSettings(key, "127.0.0.1", 0, initial_peers=initial, bulk_port=bulk_port)
        self.node = MemberNode(settings, None, ME)
        self.node.start()
        stack.callback(self.node.stop)
        self.partial = PartialState([torch.zeros(NUMEL), torch.zeros(NUMEL)])

    def take(self, donor: Peer) -> State:
        addresses = tuple(address.partition("/p2p/")[0] for address in donor.node.addresses)
        seat = Seat(donor.node.peer_id, donor.name, addresses)
        return self.node.call(download(self.node, seat, self.partial), 60)

    def lose_the_first_donor(self) -> int:
        """Kill it during the transfer; returns how many parts had arrived."""

        def kill() -> None:
            while self.partial.have < 3:
                time.sleep(0.0005)
            self.one.node.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises((StreamLost, TimeoutError)):
            self.take(self.one)
        thread.join(10)
        assert 3 <= self.partial.have < 2 * PARTS
        return self.partial.have


@pytest.mark.parametrize("bulk_port", ["auto", "off"])
def test_the_next_donor_continues_where_the_first_one_left(tmp_path: Path, bulk_port: Literal["auto", "off"]) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, state(1.0), state(2.0, round=5), bulk_port)
        had = scene.lose_the_first_donor()
        streams, open_stream = list[Stream](), scene.node.open_to_member

        async def kept(peer_id: str, protocol: str, addresses: Sequence[str] = ()) -> Stream:
            streams.append(await open_stream(peer_id, protocol, addresses))
            return streams[-1]

        scene.node.open_to_member = kept  # type: ignore[method-assign]
        found = scene.take(scene.two)
        size = 4 * PART * (2 * PARTS - had)
        assert streams[0].all_received >= size
        assert (streams[0].received < size) == (bulk_port == "auto")
        assert (found.round, found.step, found.phase_steps_done) == (5, 30, 2)
        whole = torch.cat(list(found.vectors)).view(-1, PART)
        expected = torch.tensor([1.0] * PARTS + [-1.0] * PARTS)
        expected[had:] *= 2
        assert bool((whole == expected[:, None]).all())


@pytest.mark.parametrize(("lineage", "round"), [(Lineage("other", 9), 3), (Lineage("line", 12), 4)])
def test_equal_replicas_take_all_parts_from_one_round(tmp_path: Path, lineage: Lineage, round: int) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, state(1.0, Lineage("line", 9), 3), state(2.0, lineage, round))
        scene.lose_the_first_donor()
        found = scene.take(scene.two)
        assert bool((found.vectors[0] == 2).all()) and bool((found.vectors[1] == -2).all())
        assert found.lineage == lineage


def test_a_state_that_is_not_finite_is_never_taken(tmp_path: Path) -> None:
    def bad() -> State:
        good = state(1.0)()
        good.vectors[1][7] = torch.nan
        return good

    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, bad, bad)
        scene.one.round = scene.two.round = 3
        members = Members(scene.node, "test", lambda: None)  # type: ignore[arg-type, return-value]
        # until both have announced that they have made a round
        wait_for(lambda: [it.round for it in members.refresh_all()] == [3, 3], 30)
        with pytest.raises(RunError, match="not finite"):
            take_state(context_of(scene.node, members), scene.partial.room, 3, above=0)


def test_a_late_answer_of_the_bootstrap_does_not_mean_an_empty_swarm(tmp_path: Path) -> None:
    """hivemind reports a request without an answer as an empty result."""
    with ExitStack() as stack:
        one = Peer("one", tmp_path, (), snapshot=state(1.0))
        stack.callback(one.presence.leave)
        one.presence._members.announce()
        node = Node(NodeSettings(None, "127.0.0.1", 0, initial_peers=one.node.addresses))
        node.start()
        stack.callback(node.stop)
        members = Reader(node, "test")
        node.dht.protocol.storage.clear()  # forget the records that it got as a new node
        one.node.loop.call_soon_threadsafe(time.sleep, 2 * DHT_TIMEOUT)
        assert [it.name for it in members.refresh_all()] == ["one"]
