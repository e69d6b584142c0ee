"""Groups of everyone: members that were apart from the others, and come together with them again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from peer.exchange.group.all_reduce import AllReduceExchange
from peer.p2p.stream import StreamLost
from peer.rounds.state import Lineage
from tests.simulated.loop import PROCESS
from tests.simulated.scenario import Fault, Machine, Scenario
from tests.simulated.world import World, in_a_folder

MACHINE = Machine(0.5, latency=0.02, up=1e6, down=1e6, skew=0.0, starts=0.0)


@pytest.mark.parametrize("codec", ["none", "int2"])
def test_what_a_group_has_averaged_is_not_given_to_it_again(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """A member whose verdict is lost keeps its own change. It gave that again with the next round, as the group's
    weights came to it without the news that they contain it.
    """
    swarm = Scenario(0, "group", (MACHINE,) * 4, (), 60.0, inner_steps=10, numel=300, codec=codec)
    hear, lost, changes = AllReduceExchange._hear, list[float](), list[tuple[Tensor, Tensor]]()
    with in_a_folder(swarm) as world:
        _, number, *_ = sorted(range(4), key=lambda it: world.peers[it].host.peer_id)
        member = world.peers[number]

        def watch() -> None:
            assert member.trainer is not None
            state: Any = member.trainer.state
            weights, rebase, slow = state.inner._weights.detach(), state.rebase, state.outer.slow
            counted = weights.clone()

            def rebased(*given: Any) -> None:
                trained = weights - counted
                rebase(*given)
                changes.append((weights - slow.phi, trained))

            state.rebase = rebased

        async def loses(exchange: Any, *rest: Any) -> Any:
            said, process = await hear(exchange, *rest), PROCESS.get()
            if process is member.process and world.loop.time() > 20.0 and not lost:
                lost.append(world.loop.time())
                watch()
                raise StreamLost("it is lost")
            return said

        monkeypatch.setattr(AllReduceExchange, "_hear", loses)
        world.run()
    change, trained = changes[0]
    assert float((change - trained).norm()) < 1e-4 * float(trained.norm())


def test_a_member_with_more_rounds_behind_it_is_waited_for() -> None:
    """Decoupled members keep their counts. One that had made more rounds during a split was not waited for: at every
    second boundary it came too late, and then it waited for a phase.
    """
    rest, slow, away = replace(MACHINE, step_seconds=0.5), replace(MACHINE, step_seconds=1.0), 0.55
    machines = (replace(MACHINE, step_seconds=away), rest, rest, slow)  # the split and then a slow one that leaves
    faults = (Fault(30.0, "split", (0,), 100.0, 0), Fault(131.0, "leave", (3,), 900.0, 0))
    with in_a_folder(Scenario(0, "decoupled", machines, faults, 230.0, 10, 300, "none")) as world:
        assert not world.run().violations
        ahead = world.rounds(world.peers[0])[:-1]
        healed = [row for row in ahead if row["outcome"] == "merged"][-13:]
        assert len(healed) == 13 and sum(row["seconds"]["match"] > 3.0 for row in healed) <= 1  # 5 then


def test_who_has_made_more_rounds_during_a_split_goes_back_to_those_of_the_others() -> None:
    """The part with more contributions has fewer rounds, as its lines are slow. The two others took its weights and
    kept their own round and step for ever: nobody waited for them, so they lost every second round.
    """
    slow = replace(MACHINE, up=3500, down=3500)
    machines = (*(slow,) * 6, *(replace(MACHINE, step_seconds=0.55),) * 2)
    split = (Fault(20.0, "split", (6, 7), 100.0, 0),)
    with in_a_folder(Scenario(0, "group", machines, split, 260.0, inner_steps=10, numel=300, codec="none")) as world:
        assert not world.run().violations
        rows = [world.rounds(peer)[-8:-1] for peer in world.peers]
    assert all(len((row["partner"] or "").split(",")) == 7 for its in rows for row in its)
    positions = [[(row["round"], row["step"]) for row in its] for its in rows]
    assert positions == [positions[0]] * 8


@pytest.mark.parametrize(("starts", "apart"), [(0.0, 0.0), (4.0, 0.0), (0.0, 12.0)])
def test_decoupled_members_whose_builds_drew_other_weights_begin_with_the_same(starts: float, apart: float) -> None:
    """Each kept its own for ever, and they averaged what has nothing in common. The last one begins with the others, or
    near the end of their first round, or makes its first rounds ``apart`` from them.
    """
    machines = (MACHINE, MACHINE, replace(MACHINE, starts=starts))
    split = (Fault(3.5, "split", (2,), apart, 0),) if apart else ()
    with in_a_folder(Scenario(0, "decoupled", machines, split, 60.0, inner_steps=10, numel=300, codec="none")) as world:
        other: Any = world.peers[-1]
        make, states = other._state, list[Any]()

        def drawn(*given: Any) -> Any:
            state = make(*given)
            slow = state.outer.slow
            slow.phi.mul_(-1.0)
            slow.write_fast()
            state.counters.lineage = Lineage(state._fingerprint())
            states.append(state)
            return state

        other._state = drawn
        assert not world.run().violations
        assert {row["outcome"] for row in world.rounds(other)[4 if apart else 1 : -1]} == {"merged"}
    assert [state.replaced for state in states] == [1]


@pytest.mark.parametrize(
    ("count", "pair"),
    [(4, (1, 2)), (4, (0, 1)), pytest.param(6, (0, 3), marks=pytest.mark.long), (6, (4, 5))],
)
def test_two_members_whose_line_is_cut_take_turns(count: int, pair: tuple[int, int]) -> None:
    """One of the two, or both, were left out for ever: 6 of 80 rounds. ``pair``: by the order of ids; the smallest
    leads.
    """
    swarm = Scenario(0, "group", (replace(MACHINE, step_seconds=2.0),) * count, (), 800.0, 10, 300, "none")
    with in_a_folder(swarm) as world:
        numbers = sorted(range(count), key=lambda it: world.peers[it].host.peer_id)
        one, other = (world.peers[numbers[place]].host for place in pair)
        world.loop.call_later(20.0, world.network.cut, [one], [other])
        assert not world.run().violations
        shares = [share(world, number) for number in numbers]
    for place, merged in enumerate(shares):
        assert merged > (0.3 if place in pair else 0.95)
    assert sum(shares[place] for place in pair) > 0.7


def share(world: World, number: int) -> float:
    """Of the rounds of a peer, those that were merged."""
    outcomes = [row["outcome"] for row in world.rounds(world.peers[number])[:-1]]
    return outcomes.count("merged") / len(outcomes)
