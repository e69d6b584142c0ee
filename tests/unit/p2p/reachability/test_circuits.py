"""Who gets a circuit through a relay where others have taken them all, and keep them in use."""

from __future__ import annotations

import pytest
from hivemind.p2p import PeerID

from peer import clock
from peer.p2p.budgets import CIRCUITS, Limit
from peer.p2p.reachability import relay
from peer.p2p.reachability.circuit_messages import LIMIT_EXCEEDED, OK
from peer.p2p.reachability.relay import Circuit, Relay
from peer.p2p.stream import Stream
from peer.rounds.backoff import Proven
from tests.unit.p2p.reachability.test_relay import Network, held


def caller(number: int) -> str:
    return str(PeerID(b"\x12\x20" + bytes([number]) * 32).to_base58())


class Busy:
    """A relay whose clock the test moves: all circuits are in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: Limit = CIRCUITS) -> None:
        monkeypatch.setattr(relay, "CIRCUITS", limit)
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)
        self.now = 0.0
        self.network = Network()
        self.streams: list[tuple[Stream, Stream]] = []  # both ends of each circuit

    async def call(self, number: int) -> int:
        near, status = await self.network.hop(caller(number))
        if status == OK:
            self.streams.append((near, self.network.called[-1]))
        return status

    async def use(self, number: int) -> None:
        """This circuit carries something."""
        near, far = self.streams[number]
        await near.write(bytes(relay.SIGN_OF_LIFE + 1), 1)
        await far.reader.readexactly(relay.SIGN_OF_LIFE + 1)

    def held(self) -> dict[int, int]:
        """How many each caller has, of those that do not end."""
        running = [it.ends[0] for it in self.network.relay._circuits if not it.over.is_set()]
        return {number: count for number in range(256) if (count := running.count(caller(number)))}


async def test_one_caller_takes_few_of_a_holders_circuits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had all 32, and used them by 129 bytes every 29 s: nobody else reached the holder through this relay."""
    busy = Busy(monkeypatch)
    await held(busy.network)
    statuses = [await busy.call(1) for _ in range(CIRCUITS.each)]
    assert statuses == [OK] * relay.OF_ONE_PAIR + [LIMIT_EXCEEDED] * (CIRCUITS.each - relay.OF_ONE_PAIR)
    assert await busy.call(2) == OK
    assert busy.held() == {1: relay.OF_ONE_PAIR, 2: 1}
    busy.now = relay.CIRCUIT_UNUSED  # a connection that was lost without a word: its circuit gives way
    assert await busy.call(1) == OK
    assert busy.held() == {1: relay.OF_ONE_PAIR, 2: 1}


@pytest.mark.parametrize("limit", [Limit(each=8, all=256), Limit(each=32, all=8)])
async def test_who_has_most_of_a_relay_makes_room_for_who_has_none(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(monkeypatch, limit)
    await held(busy.network)
    for number in (1, 2) * 4:
        assert await busy.call(number) == OK
        busy.now += 1
    await busy.use(0)
    assert await busy.call(3) == OK, "a circuit that is in use ends too"
    assert busy.held() == {1: 3, 2: 4, 3: 1}
    assert await busy.streams[2][0].reader.read() == b"", "the idlest of its caller"
    assert await busy.call(3) == OK
    assert busy.held() == {1: 3, 2: 3, 3: 2}
    assert [await busy.call(number) for number in (1, 2, 3)] == [LIMIT_EXCEEDED] * 3, "it goes to nobody for long"
    assert await busy.call(4) == OK
    assert busy.held()[4] == 1 and sum(busy.held().values()) == 8


@pytest.mark.parametrize("limit", [Limit(each=8, all=256), Limit(each=32, all=8)])
async def test_a_crowd_of_callers_keeps_no_proven_one_out(limit: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight callers, and as many holders of their own, had all circuits of a relay: it was shut for all others."""
    busy = Busy(monkeypatch, limit)
    await held(busy.network)
    busy.network.proven.add(caller(9))
    busy.network.proven.add(caller(10))
    assert [await busy.call(number) for number in range(1, 9)] == [OK] * 8
    assert await busy.call(99) == LIMIT_EXCEEDED, "who is new shares what is for new ids"
    for _ in range(relay.OF_ONE_PAIR):
        assert await busy.call(9) == OK
    assert busy.held()[9] == relay.OF_ONE_PAIR and sum(busy.held().values()) == 8
    assert [await busy.call(number) for number in range(1, 9)] == [LIMIT_EXCEEDED] * 8, "and keeps it"
    for _ in range(relay.OF_ONE_PAIR):
        assert await busy.call(10) == OK
    assert busy.held() == {9: relay.OF_ONE_PAIR, 10: relay.OF_ONE_PAIR}
    busy.network.proven.add(caller(11))
    assert await busy.call(11) == OK, "a hostile member may be proven too"
    assert sorted(busy.held().values()) == [1, relay.OF_ONE_PAIR - 1, relay.OF_ONE_PAIR]


@pytest.mark.parametrize("limit", [Limit(each=8, all=256), Limit(each=32, all=8)])
async def test_unused_circuits_of_proven_callers_are_kept_from_a_crowd(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who have agreed on a meeting wait for it on one. Half of the places are for who is new all the same."""
    busy = Busy(monkeypatch, limit)
    await held(busy.network)
    for number in 9, 10:
        busy.network.proven.add(caller(number))
    assert [await busy.call(number) for number in (9, 10) * 4] == [OK] * 8
    busy.now = relay.CIRCUIT_UNUSED
    assert [await busy.call(number) for number in range(1, 9)] == [OK] * 4 + [LIMIT_EXCEEDED] * 4
    assert busy.held() == dict.fromkeys((1, 2, 3, 4), 1) | {9: 2, 10: 2}
    busy.now += relay.CIRCUIT_UNUSED
    assert await busy.call(5) == OK, "it has a circuit of one that is new and does not use it"
    assert busy.held()[9] == busy.held()[10] == 2


def test_no_circuit_ends_for_one_that_cannot_be_had_or_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "CIRCUITS", Limit(each=2, all=256))
    monkeypatch.setattr(clock, "monotonic", lambda: 2 * relay.CIRCUIT_UNUSED)
    serving = Relay(Network().call, Proven())
    unused, used = 0.0, 2 * relay.CIRCUIT_UNUSED
    serving._circuits = [Circuit(("a", "x"), unused), Circuit(("a", "z"), unused)]
    serving._circuits += [Circuit(("b", "y"), used), Circuit(("c", "y"), used)]
    assert not serving._make_room("a", "y")
    assert not any(it.over.is_set() for it in serving._circuits)
    monkeypatch.setattr(relay, "CIRCUITS", Limit(each=2, all=4))
    serving._circuits[2].used = unused + 1
    assert serving._make_room("d", "y")
    assert [it.over.is_set() for it in serving._circuits] == [False, False, True, False]
