"""A stopping peer cancels its meetings at once, before it writes its checkpoint and ends its node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from peer.rounds.types import Grouping
from tests.swarm.support.harness import wait_for
from tests.swarm.support.node_peer import Peer, in_threads, join_all


def pair(folder: Path, stack: ExitStack, grouping: Grouping) -> tuple[Peer, Peer]:
    one = Peer("one", folder, (), grouping=grouping, equal=grouping is Grouping.EVERYONE)
    stack.callback(one.presence.leave)
    two = Peer("two", folder, one.node.addresses, grouping=grouping, equal=grouping is Grouping.EVERYONE)
    stack.callback(two.presence.leave)
    return one, two


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as it:
        yield it


def test_a_partner_is_free_as_soon_as_the_other_peer_is_asked_to_stop(tmp_path: Path, stack: ExitStack) -> None:
    one, two = pair(tmp_path, stack, Grouping.PAIR)
    for peer in (one, two):
        peer.pace = 10.0  # phases of ten seconds
    threads = in_threads(lambda: one.train(50), lambda: two.train(50))
    meets = [peer.presence._matching for peer in (one, two)]
    wait_for(lambda: all(it._agreement.meeting is not None for it in meets), 40)  # type: ignore[union-attr]
    one.stop.request()
    round = meets[1]._agreement.round  # type: ignore[union-attr]
    wait_for(lambda: meets[1]._agreement.meeting is None, 2.0)  # type: ignore[union-attr]
    assert meets[1]._agreement.round == round  # type: ignore[union-attr]  # it did not wait until its boundary
    assert one.node.failure == ""  # its node still runs
    two.stop.request()
    join_all(threads, 30)


@pytest.mark.parametrize(("who", "seconds"), [("leader", 6.0), ("member", 2.5)])  # otherwise: 12.8 and 4.1
def test_a_group_does_not_wait_for_a_peer_that_is_asked_to_stop(
    tmp_path: Path, stack: ExitStack, who: str, seconds: float
) -> None:
    peers = pair(tmp_path, stack, Grouping.EVERYONE)
    for peer in peers:
        peer.pace = 4.0
    threads = in_threads(*(lambda peer=peer: peer.train(50) for peer in peers))  # type: ignore[misc]
    for peer in peers:
        wait_for(lambda peer=peer: any(group.links for group in peer.groups), 40)  # type: ignore[misc]
    leaving, staying = sorted(peers, key=lambda peer: peer.node.peer_id, reverse=who == "member")
    time.sleep(1)  # it takes part in the gathering for the next boundary
    leaving.stop.request()
    count = len(staying.waits)
    wait_for(lambda: len(staying.waits) > count, 30)
    assert staying.waits[count] < seconds, staying.waits
    staying.stop.request()
    join_all(threads, 30)
