"""A killed peer resumes from its last checkpoint with the same losses as a peer that was not killed."""

from __future__ import annotations

import signal

import pytest

from tests.swarm.support.harness import Swarm

# long enough for the kill to come before the end, also on a busy machine
RUN = ("run.steps=2000", "run.inner_steps=50", "peer.stream=7", "peer.checkpoint.every_rounds=2", "peer.threads=1")
ROUNDS = 42  # 39 full phases, and 25, 13 and 12 steps


@pytest.mark.smoke
def test_a_resumed_peer_has_the_losses_of_one_that_was_not_killed(swarm: Swarm) -> None:
    whole = swarm.peer("whole", *RUN)
    assert whole.exit_code(90) == 0, whole.output()
    killed = swarm.peer("killed", *RUN)
    swarm.wait_for_rounds("killed", 5)
    killed.signal(signal.SIGKILL)
    killed.exit_code(10)
    assert len(swarm.rounds("killed")) < ROUNDS

    again = swarm.start("again", swarm.train("killed", *RUN))
    resumed = int(again.line(r"resumed: .* step=(\d+)").group(1))
    assert 200 <= resumed < 2000
    assert again.exit_code(90) == 0, again.output()
    expected, rows = swarm.rounds("whole"), swarm.rounds("killed")
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in expected]
    assert {row["outcome"] for row in rows} == {"alone"}

    done = swarm.start("once-more", swarm.train("killed", *RUN))  # a finished run has nothing left to do
    assert done.exit_code(60) == 0
    assert len(swarm.rounds("killed")) == ROUNDS
