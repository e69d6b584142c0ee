"""What the simulation models: a member without an invitation, and the lines of the network."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hivemind.p2p import PeerID

from peer.swarm.presence import Presence
from peer.training.boundaries.blocking import Blocking
from tests.simulated.harm.faults import Faults
from tests.simulated.loop import Process, VirtualLoop
from tests.simulated.p2p.admission import NEVER, Invitations
from tests.simulated.p2p.network import Network, SimulatedP2P
from tests.simulated.runtime import Runtime
from tests.simulated.scenario import Machine, Scenario, scenario
from tests.simulated.world import simulate


def test_a_member_that_goes_on_without_an_invitation_still_turns_outsiders_away() -> None:
    """It let everybody in, so the check that nobody meets an outsider found it, and no defect of the product."""
    swarm = Invitations(1)
    stubborn = swarm.authority("Qm1", expires=0.0, stubborn=True).admission
    swarm.revoke("Qm1")
    swarm.revoke("Qm2")
    assert stubborn.learn(swarm.revocations)
    assert stubborn.objection(stubborn.own, "Qm1") == ""
    assert stubborn.objection(swarm.authority("Qm2").admission.own, "Qm2") == ""  # it keeps no list of revocations
    forged = Invitations(2).authority("Qm3", NEVER).admission.own
    assert "not signed by the owner" in stubborn.objection(forged, "Qm3")


def test_a_slow_sender_holds_up_nobody_elses_bytes_and_fast_ones_share_the_receivers_line() -> None:
    """Two peers on good lines could not meet while a third one, on a line of 400 bytes a second, called both."""
    network = Network(VirtualLoop(), random.Random(0))
    slow, one, two = (network.add(0.01, up, 1e6) for up in (400.0, 1e6, 1e6))
    receiver = network.add(0.01, 1e6, 1e6)
    assert network.arrival(slow, receiver, 4000) > 10.0
    assert network.arrival(one, receiver, 100_000) < 0.3
    assert network.arrival(two, receiver, 1_000_000) > 1.1


def test_a_stream_that_its_caller_gives_up_on_a_cut_line_is_reset() -> None:
    """It stayed open for ever, at a peer that had never heard of it: those of an outsider exceeded the bound."""
    runtime = Runtime(random.Random(0))
    network = Network(runtime.loop, random.Random(0))
    caller, called = (network.add(0.01, 1e6, 1e6) for _ in range(2))
    called.process = Process("called")
    caller.book.add(called.peer_id)

    async def world() -> None:
        to, p2p = PeerID.from_base58(called.peer_id), SimulatedP2P(network, caller)
        link = await network.connect(caller, called.peer_id)
        network.cut([caller], [called])
        try:
            async with asyncio.timeout(5.0):
                await p2p.call_binary_stream_handler(to, "any")
        except TimeoutError:
            await asyncio.sleep(1.0)
        assert not link.streams

    with runtime.installed():
        runtime.loop.run_until_complete(world())


def test_a_seed_whose_faults_do_not_happen_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passed: an exception of the simulation itself was a line of the trace."""

    def broken(self: Faults, fault: object) -> None:
        raise TypeError("no such fault")

    monkeypatch.setattr(Faults, "happen", broken)
    violations = simulate(scenario(3)).violations
    assert len(violations) == len(scenario(3).faults) and all("no such fault" in it for it in violations)


def test_a_group_in_which_a_liar_keeps_all_others_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary with a liar counted for nobody, and all of a group meet it at each boundary."""
    monkeypatch.setattr(Presence, "avoid", lambda *_, **__: None)
    monkeypatch.setattr(Blocking, "_repeats", lambda *_: False)
    honest = Machine(0.2, latency=0.02, up=1e6, down=1e6, skew=0.0, starts=0.0)
    machines = honest, honest, replace(honest, lie="false mean")
    report = simulate(Scenario(0, "group", machines, (), 60.0, inner_steps=10, numel=300, codec="none"))
    assert not report.merges and any("stay alone" in it for it in report.violations)
