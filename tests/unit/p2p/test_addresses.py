"""Which of a member's addresses is used for its place as a relay."""

from __future__ import annotations

from peer.p2p.addresses import direct_ways, most_public


def test_a_public_address_goes_before_one_of_a_private_network() -> None:
    inside, outside = "/ip4/192.168.1.5/tcp/4000", "/ip4/45.1.2.3/tcp/31337"
    assert most_public([inside, outside]) == outside
    assert most_public([inside, "/ip4/10.0.0.1/tcp/4000"]) == inside
    assert most_public([inside, "/dns4/example.org/tcp/4000"]) == "/dns4/example.org/tcp/4000"
    assert most_public([f"{outside}/p2p/QmRelay/p2p-circuit", inside]) == inside  # a relay cannot be called through one


def test_who_is_in_the_same_network_is_not_dialled_through_a_relay() -> None:
    """Of four runs one had its swaps through the bootstrap node, which answered first."""
    own, relayed = "/ip4/192.168.1.5/tcp/4000", "/ip4/45.1.2.3/tcp/31337/p2p/QmRe1ay/p2p-circuit"
    assert direct_ways([own, relayed, own]) == [own, own]
    assert direct_ways([relayed, own]) == [relayed, own], "nobody can dial it"
    assert direct_ways([]) == []
