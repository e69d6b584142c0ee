"""Two processes that swap and average over real streams: they converge, or one is killed or frozen."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.swarm.support.harness import Process, Swarm, wait_for

PROGRAM = "tests.swarm.programs.averaging_peer"
STALL = 3.0  # seconds, the same as in averaging_peer.py


def peer(swarm: Swarm, name: str, seed: int, rounds: int, numel: int, *more: str) -> Process:
    key = str(swarm.folder / f"{name}.key")
    return swarm.start(name, ["-m", PROGRAM, key, str(seed), str(rounds), str(numel), *more])


def weights(process: Process) -> torch.Tensor:
    return torch.tensor([float(word) for word in process.line(r"weights (.*)").group(1).split()])


def test_two_peers_without_inner_steps_converge_to_the_same_weights(swarm: Swarm) -> None:
    one = peer(swarm, "one", 1, 40, 5000)
    two = peer(swarm, "two", 2, 40, 5000, one.line(r"address (\S+)").group(1))
    assert one.exit_code() == two.exit_code() == 0, one.output() + two.output()
    assert one.output().count(" merged ") == two.output().count(" merged ") == 40
    starts = [torch.randn(5000, generator=torch.Generator().manual_seed(seed))[:20] for seed in (1, 2)]
    assert (starts[0] - starts[1]).norm() > 1
    torch.testing.assert_close(weights(one), weights(two), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(weights(one), (starts[0] + starts[1]) / 2, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("survivor_dials", [True, False])
def test_a_partner_lost_during_a_swap_costs_its_deadline_and_changes_nothing(
    swarm: Swarm, fault: int, survivor_dials: bool
) -> None:
    numel = 2_000_000  # 8 parts
    if survivor_dials:
        victim = peer(swarm, "victim", 1, 1, numel, "--stall-after-part")
        survivor = peer(swarm, "survivor", 2, 1, numel, victim.line(r"address (\S+)").group(1))
    else:
        survivor = peer(swarm, "survivor", 2, 1, numel)
        victim = peer(swarm, "victim", 1, 1, numel, survivor.line(r"address (\S+)").group(1), "--stall-after-part")
    victim.line("stalling")
    victim.signal(fault)
    swap = survivor.line(r"swap 0 (\w+) seconds=([\d.]+) untouched=(\w+)")
    assert swap.group(1) == "timeout"
    assert float(swap.group(2)) < STALL + 2
    assert swap.group(3) == "True"
    assert survivor.exit_code() == 0
    swarm.note_children()
    victim.signal(signal.SIGCONT)
    victim.signal(signal.SIGKILL)
    wait_for(lambda: not [left for left in swarm.left_over() if left.startswith("process")], 10)
