"""A newcomer whose donor leaves in mid-way, between real nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from peer.errors import RunError
from peer.rounds import NO_ROUNDS, Lineage, Seat
from peer.streams import StreamLost
from peer.swarm import identity
from peer.swarm.donor import State
from peer.swarm.join import Taken, _take, take_state
from peer.swarm.meeting import Party
from peer.swarm.members import Members
from peer.swarm.node import Node, NodeSettings
from peer.swarm.records import MemberRecord
from peer.vectors import PART
from tests.swarm.node_peer import Peer

PARTS = 96
NUMEL = PARTS * PART
ME = Party("new", "test", "c", "{}")


def state(value: float, lineage: Lineage = NO_ROUNDS, round: int = 3) -> Callable[[], State]:
    return lambda: State(30, round, [torch.full((NUMEL,), value), torch.full((NUMEL,), -value)], lineage, 2)


class Scene:
    """Two donors and a newcomer."""

    def __init__(self, folder: Path, stack: ExitStack, one: Callable[[], State], two: Callable[[], State]) -> None:
        self.one = Peer("one", folder, (), snapshot=one)
        stack.callback(self.one.presence.leave)
        self.two = Peer("two", folder, self.one.node.addresses, snapshot=two)
        stack.callback(self.two.presence.leave)
        key = folder / "new.key"
        identity.load_or_create(key)
        self.node = Node(NodeSettings(key, "127.0.0.1", 0, initial_peers=self.two.node.addresses))
        self.node.start()
        stack.callback(self.node.stop)
        self.taken = Taken([torch.zeros(NUMEL), torch.zeros(NUMEL)])

    def take(self, donor: Peer) -> State:
        addresses = tuple(address.partition("/p2p/")[0] for address in donor.node.addresses)
        seat = Seat(donor.node.peer_id, donor.name, addresses)
        return self.node.call(_take(self.node, seat, ME, "layout", self.taken), 60)

    def lose_the_first_donor(self) -> int:
        """Kill it when some parts have come; returns how many came before."""

        def kill() -> None:
            while self.taken.have < 3:
                time.sleep(0.0005)
            self.one.node.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises((StreamLost, TimeoutError)):
            self.take(self.one)
        thread.join(10)
        assert 3 <= self.taken.have < 2 * PARTS
        return self.taken.have


def test_the_next_donor_goes_on_where_the_first_one_left(tmp_path: Path) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, state(1.0), state(2.0, round=5))
        had = scene.lose_the_first_donor()
        found = scene.take(scene.two)
        assert (found.round, found.step, found.phase_steps_done) == (5, 30, 2)
        whole = torch.cat(list(found.vectors)).view(-1, PART)
        expected = torch.tensor([1.0] * PARTS + [-1.0] * PARTS)
        expected[had:] *= 2
        assert bool((whole == expected[:, None]).all())


@pytest.mark.parametrize(("lineage", "round"), [(Lineage("other", 9), 3), (Lineage("line", 12), 4)])
def test_equal_replicas_take_all_from_one_round(tmp_path: Path, lineage: Lineage, round: int) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, state(1.0, Lineage("line", 9), 3), state(2.0, lineage, round))
        scene.lose_the_first_donor()
        found = scene.take(scene.two)
        assert bool((found.vectors[0] == 2).all()) and bool((found.vectors[1] == -2).all())
        assert found.lineage == lineage


def test_a_state_with_a_hole_in_it_is_never_taken(tmp_path: Path) -> None:
    def bad() -> State:
        good = state(1.0)()
        good.vectors[1][7] = torch.nan
        return good

    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, bad, bad)
        scene.one.round = scene.two.round = 3
        for donor in (scene.one, scene.two):
            donor.presence._members.refresh_all()
        time.sleep(6.5)  # until both have announced that they are behind a round
        members = Members(scene.node, "test", lambda: None)  # type: ignore[arg-type, return-value]
        with pytest.raises(RunError, match="not finite"):
            take_state(scene.node, members, ME, "layout", scene.taken.room, 3, above=0)


def test_a_stop_is_heard_while_a_donor_keeps_us_waiting(tmp_path: Path) -> None:
    def slow() -> State:
        time.sleep(8)
        return state(1.0)()

    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, slow, slow)
        asked, began = threading.Event(), time.monotonic()
        threading.Timer(1.0, asked.set).start()
        listed, room = Listed(scene.one, scene.two), scene.taken.room
        found = take_state(scene.node, listed, ME, "layout", room, 60, above=0, stopped=asked.is_set)  # type: ignore[arg-type]
        assert found is None
        assert 1.0 <= time.monotonic() - began < 5.0


class Listed:
    """What the directory says, which is some seconds old: both donors behind round 3."""

    def __init__(self, *donors: Peer) -> None:
        self._records = [it.presence._record().model_copy(update={"round": 3}) for it in donors]

    def refresh_all(self) -> list[MemberRecord]:
        return self._records


@pytest.mark.parametrize(("reached", "taken"), [(9, {9}), (20, {4, 9}), (0, {4, 9})])
def test_who_comes_back_asks_on_for_a_donor_that_has_its_last_rounds(
    tmp_path: Path, reached: int, taken: set[int]
) -> None:
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack, state(1.0, round=4), state(2.0, round=9))
        listed = Listed(scene.one, scene.two)
        for _ in range(4 if reached == 9 else 1):  # in random order
            found = take_state(scene.node, listed, ME, "layout", scene.taken.room, 30, above=0, reached=reached)  # type: ignore[arg-type]
            assert found is not None and found.round in taken
