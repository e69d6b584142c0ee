"""Peers that nobody can dial: they find relays, lose them, and are met through others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.p2p import node
from peer.p2p.addresses import is_circuit
from peer.p2p.budgets import Limit
from peer.p2p.reachability import own_addresses, relay
from peer.p2p.reachability.decide import Reachability
from peer.p2p.reachability.dialback import DialBack
from peer.p2p.reachability.own_addresses import ADDRESS_LOOK_SECONDS, LOOK_AGAIN_SECONDS
from peer.p2p.reachability.reservations import UNUSED_SECONDS
from peer.p2p.stream import Stream
from peer.telemetry.run_log import Row
from tests.simulated.cases.test_pairing import machine
from tests.simulated.checks.conduct import GOODBYE
from tests.simulated.harm.bad_relays import RELAY_LIES
from tests.simulated.scenario import CALM, Fault, Kind, Scenario
from tests.simulated.world import World, in_a_folder

PACE = 0.3  # seconds of an inner step: nobody makes one in less time
FOUND = 60.0  # seconds: a lost relay is noticed within 25, another one granted and announced within 20


def swarm(public: int, hidden: int, *, seconds: float, faults: tuple[Fault, ...] = ()) -> Scenario:
    machines = [machine(PACE)] * public + [replace(machine(PACE), nat=True)] * hidden
    return Scenario(0, "blocking", tuple(machines), faults, seconds, inner_steps=10, numel=300, codec="none")


def hidden_merges(world: World, since: float) -> list[Row]:
    """Merges of two peers that nobody can dial, after so many seconds: only a relay joins them."""
    hidden = {peer.name: peer for peer in world.peers if peer.host.nat}
    rows = [row for peer in hidden.values() for row in world.rounds(peer) if row["step"] > since / peer.step_seconds]
    return [row for row in rows if row["outcome"] == "merged" and row["partner"] in hidden]


def test_two_peers_behind_nats_meet_through_a_relay() -> None:
    with in_a_folder(swarm(1, 2, seconds=90.0)) as world:
        report = world.run()
        assert not report.violations
        assert len(hidden_merges(world, 0.0)) > 10


def test_who_loses_its_only_initial_peer_is_reached_through_a_member() -> None:
    """It kept to its initial peers: two behind NATs did not meet again until the bootstrap node was back."""
    gone = Fault(40.0, "bootstrap", (), 1000.0, 0)
    with in_a_folder(swarm(2, 3, seconds=40.0 + FOUND + 60.0, faults=(gone,))) as world:
        report = world.run()
        assert not report.violations
        assert len(hidden_merges(world, 40.0 + FOUND)) > 5


@pytest.mark.parametrize("lie", RELAY_LIES)
def test_a_bad_relay_keeps_nobody_from_a_good_one(lie: str) -> None:
    gone = Fault(30.0, "bootstrap", (), 1000.0, 0)
    scenario = swarm(4, 2, seconds=30.0 + 2 * FOUND, faults=(gone,))
    count = 2 if lie == "joins nobody" else 3  # three of these would fill all its reservations
    bad = [replace(it, relay=lie) for it in scenario.machines[:count]]
    with in_a_folder(replace(scenario, machines=(*bad, *scenario.machines[count:]))) as world:
        report = world.run()
        assert not report.violations
        assert len(hidden_merges(world, 30.0 + FOUND)) > 1


def test_relays_through_which_nobody_calls_are_replaced() -> None:
    """They join nobody, and an honest one comes back when all places are taken."""
    away = Fault(30.0, "bootstrap", (), 160.0, 0)
    scenario = swarm(3, 2, seconds=3 * UNUSED_SECONDS, faults=(away,))
    *bad, first, second = (replace(it, step_seconds=2.0) for it in scenario.machines)
    bad = [replace(it, relay="joins nobody") for it in bad]
    with in_a_folder(replace(scenario, machines=(*bad, first, second))) as world:
        report = world.run()
        assert all("has no relay" in it for it in report.violations), "for longer than the promise allows where it can"
        assert len(hidden_merges(world, 2 * UNUSED_SECONDS)) > 3


@pytest.mark.parametrize("kind", ["blocking", pytest.param("overlapped", marks=pytest.mark.long)])
def test_more_pairs_than_a_relay_has_circuits_meet_through_it(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p keeps what it has opened: unused circuits took all the places, and other pairs never met."""
    monkeypatch.setattr(relay, "CIRCUITS", Limit(each=32, all=4))
    slow = tuple(replace(it, step_seconds=2.0) for it in swarm(1, 5, seconds=0.0).machines)
    scenario = replace(swarm(1, 5, seconds=900.0), machines=slow, kind=kind)
    with in_a_folder(scenario) as world:
        report = world.run()
        assert not report.violations
        hidden = {peer.name: peer for peer in world.peers if peer.host.nat}
        merges = [(name, row["partner"]) for name, peer in hidden.items() for row in world.rounds(peer)]
        met = {frozenset(pair) for pair in merges if pair[1] in hidden}
        assert len(met) == 10


@pytest.mark.parametrize("kind", ["revoke", "expire"])
@pytest.mark.parametrize("ended", ["the holder's", "the relay's"])
def test_a_reservation_ends_with_an_invitation(kind: str, ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was checked when its stream opened: a member was reached through relays for ever after its invitation."""

    async def asks_nobody(*_: object) -> None:
        """Whose invitation has ended goes on, whatever an initial peer says of it."""

    monkeypatch.setattr(node, "notice_of", asks_nobody)
    at, who = 100.0, {"the relay's": "peer0", "the holder's": "peer2"}[ended]
    fault = Fault(at, kind, (int(who[-1]),), 0.0, 0, stubborn=True)
    scenario = replace(swarm(2, 2, seconds=at + GOODBYE + CALM, faults=(fault,)), invited=True)
    held: list[set[tuple[str, str]]] = []  # relay and holder, by their names

    def look() -> None:
        names = {it.host.peer_id: it.name for it in world.peers} | {world.bootstrap.peer_id: "bootstrap"}
        nodes = [world.bootstrap_node, *(it.trainer.member.node for it in world.peers if it.trainer is not None)]
        held.append({(names[it.host.peer_id], names[holder]) for it in nodes for holder in it.reservations})

    with in_a_folder(scenario) as world:
        for second in (at, at + GOODBYE):
            world.loop.call_later(second, look)
        report = world.run()
    assert not report.violations
    whole = {(relay, holder) for relay in ("bootstrap", "peer0", "peer1") for holder in ("peer2", "peer3")}
    assert held == [whole, {pair for pair in whole if who not in pair}]


def told_late(monkeypatch: pytest.MonkeyPatch, **later: object) -> None:
    """At their start nobody tells peers whether others can dial them."""

    async def at_first(*_: object) -> Reachability:
        return Reachability(unknown=True)

    monkeypatch.setattr(node, "decide", at_first)
    if later:

        async def then(*_: object, **__: object) -> Reachability:
            return Reachability(**later)  # type: ignore[arg-type]

        monkeypatch.setattr(own_addresses, "decide", then)


def test_who_learns_late_that_nobody_can_dial_it_is_met_through_a_relay_and_asked_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told_late(monkeypatch)
    with in_a_folder(swarm(1, 2, seconds=180.0)) as world:
        world.run()
        assert len(hidden_merges(world, LOOK_AGAIN_SECONDS + FOUND)) > 3
        clients = {peer.name: world.nodes[peer.host.peer_id].protocol.client_mode for peer in world.peers}
        assert clients == {"peer0": False, "peer1": True, "peer2": True}


def test_an_address_that_others_find_late_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    told_late(monkeypatch, announce=("/ip4/45.9.9.9/tcp/10030",))
    with in_a_folder(swarm(1, 1, seconds=LOOK_AGAIN_SECONDS * 1.2 + 70.0)) as world:
        assert addresses_at(world, LOOK_AGAIN_SECONDS * 1.2 + 60.0) == ["/ip4/45.9.9.9/tcp/10030"]


def addresses_at(world: World, second: float) -> list[str]:
    """What peer0 has in its records of others then. Runs the world."""
    seen: list[str] = []

    def look() -> None:
        trainer = world.peers[0].trainer
        assert trainer is not None
        seen.extend(place for it in trainer.boundary.presence.others() for place in it.addresses)

    world.loop.call_later(second, look)
    world.run()
    return seen


def test_an_address_that_changes_is_announced_after_a_look() -> None:
    """A record named the address of the start for ever."""
    later = 1.2 * ADDRESS_LOOK_SECONDS + 60.0  # and the next records
    with in_a_folder(swarm(2, 0, seconds=20.0 + later + 10.0)) as world:
        moved = world.peers[1].host
        world.loop.call_later(20.0, setattr, moved, "address", "/ip4/45.7.7.7/tcp/4000")
        assert addresses_at(world, 20.0 + later) == ["/ip4/45.7.7.7/tcp/4000"]


def test_who_moves_behind_a_nat_is_met_through_a_relay() -> None:
    later = 1.2 * ADDRESS_LOOK_SECONDS + FOUND
    with in_a_folder(swarm(1, 3, seconds=20.0 + later + 60.0)) as world:
        moved = world.peers[1].host
        moved.nat = False

        def move() -> None:
            moved.address, moved.nat = "/ip4/45.7.7.7/tcp/4000", True
            world.network.drop_all(moved)

        world.loop.call_later(20.0, move)
        world.run()
        assert len(hidden_merges(world, 20.0 + later)) > 5


@pytest.mark.parametrize("result", ["timeout", "reached"])
def test_one_member_that_lies_about_dialling_moves_nobody(result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap node was gone or full, and one by one the members left the DHT and used relays for good; or they
    announced an address that was not theirs.
    """
    answer, dial, until = DialBack.answer, DialBack._result, 30.0 + 5 * ADDRESS_LOOK_SECONDS

    def lies(served: DialBack) -> bool:
        return served._dial.__self__.host is world.peers[0].host  # type: ignore[attr-defined]

    async def answer_falsely(served: DialBack, stream: Stream) -> None:
        stream.origin = "/ip4/45.6.6.6/tcp/1" if lies(served) else stream.origin
        await answer(served, stream)

    async def dial_falsely(served: DialBack, host: str, port: int, asker: str) -> object:
        return result if lies(served) else await dial(served, host, port, asker)

    monkeypatch.setattr(DialBack, "answer", answer_falsely)
    monkeypatch.setattr(DialBack, "_result", dial_falsely)
    gone = Fault(30.0, "bootstrap", (), 1000.0, 0)
    with in_a_folder(swarm(4, 1, seconds=until + 20.0, faults=(gone,))) as world:
        seen = addresses_at(world, until)
        assert not world.report.violations
        others = [peer.host for peer in world.peers[1:]]
        assert [world.nodes[it.peer_id].protocol.client_mode for it in others] == [False, False, False, True]
        assert {it.address for it in others} == {it for it in seen if not is_circuit(it)}
