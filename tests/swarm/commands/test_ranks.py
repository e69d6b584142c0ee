"""Peers of several ranks, as torchrun starts them: they swap with each other and with peers of one rank."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.swarm.support.harness import Process, Swarm, running, wait_for
from tests.unit.replica.ranks_harness import environment, free_port

RUN = ("run.steps=100000", "run.inner_steps=20", "peer.checkpoint.every_rounds=1")


def by_torchrun(swarm: Swarm, name: str, *sets: str, address: str) -> Process:
    """Two ranks, started by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return swarm.start(name, [*torchrun, *swarm.train(name, *sets, address=address)])


def two_ranks(swarm: Swarm, name: str, *sets: str, address: str = "") -> tuple[Process, Process]:
    """The two ranks that torchrun would start, without torchrun."""
    port = free_port()
    rank_0 = swarm.peer(name, *sets, address=address, env=environment(0, 2, port))
    rank_1 = swarm.start(f"{name}-1", swarm.train(name, *sets, address=address), environment(1, 2, port))
    return rank_0, rank_1


def met(swarm: Swarm, name: str, *partners: str, since: int = 0, seconds: float = 90) -> None:
    """Wait until a peer has merged with each of them."""

    def look() -> bool:
        rows = swarm.rounds(name)[since:]
        return {row["partner"] for row in rows if row["outcome"] == "merged"} >= set(partners)

    wait_for(look, seconds, lambda: "\n".join(process.output() for process in swarm.processes))


def errors(process: Process) -> list[str]:
    return [line for line in process.output().splitlines() if "error:" in line]


def rank_1_of(process: Process) -> psutil.Process:
    children = psutil.Process(process.pid).children(recursive=True)
    return next(it for it in children if it.environ().get("RANK") == "1" and it.ppid() == process.pid)


def test_peers_of_two_ranks_and_of_one_merge_and_survive_each_other(swarm: Swarm) -> None:
    _, address = swarm.bootstrap()
    many = by_torchrun(swarm, "many", *RUN, address=address)
    two, other = two_ranks(swarm, "two", *RUN, address=address)
    one = swarm.peer("one", *RUN, address=address)
    met(swarm, "many", "two", "one")

    children = psutil.Process(many.pid).children(recursive=True)
    rank_1_of(many).kill()
    assert many.exit_code(60) != 0
    assert not [it for it in children if running(it)]
    assert len(errors(many)) == 1, many.output()
    assert "error: rank 1 of this peer has ended, and a part of the weights with it" in errors(many)[0]
    met(swarm, "two", "one", since=len(swarm.rounds("two")))

    again = swarm.start("again", swarm.train("many", *RUN, address=address))  # with one rank
    assert int(again.line(r"resumed: .* step=(\d+)").group(1)) > 0
    met(swarm, "many", "two", since=len(swarm.rounds("many")))

    for process in (two, other):  # as torchrun forwards it
        process.signal(signal.SIGTERM)
    assert (two.exit_code(30), other.exit_code(30)) == (0, 0), two.output() + other.output()
    last = swarm.rounds("two")[-1]["step"]
    back, helper = two_ranks(swarm, "two", *RUN, address=address)
    resumed = int(back.line(r"resumed: .* step=(\d+)").group(1))
    assert last <= resumed < last + 20  # it may have been stopped between two boundaries
    for process in (one, two, other, again, back, helper):
        assert "Traceback" not in process.output() and not errors(process), process.output()


def test_an_overlapped_swap_and_the_end_of_rank_0(swarm: Swarm) -> None:
    overlap = (*RUN, "run.exchange.overlap=true", "run.exchange.codec=int8", "run.inner_steps=100")
    two, other = two_ranks(swarm, "two", *overlap)
    address = two.line(r"ready: .* address=(\S+)").group(1)
    swarm.peer("one", *overlap, address=address)
    met(swarm, "two", "one")
    met(swarm, "one", "two")
    two.signal(signal.SIGKILL)
    assert other.exit_code(20) == 1
    assert errors(other) == ["error: rank 0 of this peer has ended; start again, it resumes"]


@pytest.mark.parametrize(
    ("setting", "words"), [("run.batch_size=3", "not a multiple of the 2 ranks"), ("run.steps=none", "run.steps: ")]
)
def test_an_invalid_configuration_is_one_line(swarm: Swarm, setting: str, words: str) -> None:
    two, other = two_ranks(swarm, "two", setting)
    assert two.exit_code(60) == 2
    assert len(errors(two)) == 1 and words in errors(two)[0], two.output()
    if "batch" in setting:
        assert other.exit_code(20) == 2
    assert other.output() == ""
