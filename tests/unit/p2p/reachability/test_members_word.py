"""What members say of this node when no initial peer answers. One of them may lie."""

from __future__ import annotations

from typing import Any

import pytest

from peer.p2p.reachability.decide import Reachability
from tests.unit.p2p.reachability.test_dialback import HOME, ME, SEEN, Others, by_members

PUBLIC, MOVED = "/ip4/45.0.0.9/tcp/4001", "/ip4/45.0.0.77/tcp/4001"
NOT_REACHED, REACHED = (SEEN, {}), (SEEN, {("45.0.0.9", 4001): ME})
AT_ANOTHER = ("/ip4/45.0.0.77/tcp/61000", {("45.0.0.77", 4001): ME})  # a lie, or we have moved
AT_HOME = ("/ip4/192.168.1.2/tcp/61000", {("192.168.1.2", 4001): ME})


@pytest.mark.parametrize("lie", [NOT_REACHED, ("/ip4/45.0.0.77/tcp/1", {}), AT_ANOTHER, AT_HOME])
@pytest.mark.parametrize("place", range(3))
def test_one_member_of_three_lies_in_vain(lie: Any, place: int) -> None:
    """It said that it cannot dial this peer, which used relays from then on; or it named somebody else's address."""
    views = [REACHED, REACHED]
    views.insert(place, lie)
    assert by_members(Others(*views), PUBLIC) == Reachability()


@pytest.mark.parametrize(
    "views",
    [
        [NOT_REACHED],
        [REACHED],
        [AT_ANOTHER],
        [REACHED, NOT_REACHED],
        [REACHED, AT_ANOTHER],
        [AT_ANOTHER, NOT_REACHED],
        [REACHED, NOT_REACHED, NOT_REACHED],
        [REACHED, NOT_REACHED, AT_ANOTHER],
    ],
)
def test_what_one_member_says_or_another_one_contradicts_counts_for_nothing(views: list[Any]) -> None:
    assert by_members(Others(*views), PUBLIC) == Reachability(unknown=True)


def test_what_two_members_say_counts() -> None:
    for other in NOT_REACHED, REACHED:
        found = by_members(Others(AT_ANOTHER, other, AT_ANOTHER), PUBLIC, HOME)
        assert {MOVED, HOME} <= {*found.announce} and found.announce[0] == MOVED and found.by_members
        assert not found.relayed and not found.local
    assert by_members(Others(AT_HOME, NOT_REACHED, AT_HOME), HOME) == Reachability(local=True)
