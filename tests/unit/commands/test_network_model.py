"""The network model against the NoLoCo paper's section 5.3, against arithmetic by hand, and what its options refuse."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from peer.commands import cli
from peer.commands.simulate.network.conditions import Chance, Conditions
from peer.commands.simulate.network.methods import GOODPUT, groups, pairs, pairs_by_round, transfer, tree_to_pair
from peer.errors import UserError

QUIET = Conditions(peers=64, rounds=10, inner_steps=20, payload=0, step_seconds=1.0, step_sigma=0.0, latency=0.0)
# inner steps are log-normal with mu 1 and sigma^2 0.5, communication is left out
PAPER = replace(QUIET, peers=1024, rounds=250, inner_steps=100, step_seconds=math.e, step_sigma=math.sqrt(0.5))


@pytest.mark.long
def test_the_papers_blocking_experiment() -> None:
    """1024 accelerators, 100 inner steps: DiLoCo takes about a fifth longer (arXiv 2506.10911, Fig. 5B)."""
    ours, theirs, everyone = pairs(PAPER), pairs_by_round(PAPER), groups(PAPER)
    assert everyone.idle_share == pytest.approx(0.23, abs=0.02)
    assert theirs.idle_share == pytest.approx(0.08, abs=0.015)
    assert everyone.seconds / theirs.seconds == pytest.approx(1.19, abs=0.03)
    assert ours.idle_share < theirs.idle_share
    assert ours.merged_share > 0.9


@pytest.mark.parametrize(("peers", "hours"), [(16, 1.07), (64, 1.12)])
def test_fewer_peers_wait_for_less(peers: int, hours: float) -> None:
    it = replace(PAPER, peers=peers)
    assert groups(it).seconds / pairs_by_round(it).seconds == pytest.approx(hours, abs=0.03)


@pytest.mark.parametrize("peers", [2, 64, 1024])
def test_a_tree_takes_log2_n_times_as_long_as_a_pair(peers: int) -> None:
    """And longer when messages differ: each level waits for its slowest."""
    it = replace(QUIET, peers=peers, latency=0.03, latency_sigma=0.0)
    assert tree_to_pair(it) == pytest.approx(math.log2(peers))
    differ = tree_to_pair(replace(it, latency_sigma=0.7))
    assert differ == pytest.approx(1, abs=0.1) if peers == 2 else differ > 1.3 * math.log2(peers)


def test_the_longer_of_two_log_normal_messages_is_as_in_the_papers_equation_7() -> None:
    chance = Chance(replace(QUIET, latency=1.0, latency_sigma=0.7), 0)
    mean = np.mean([chance.latency(2) for _ in range(20_000)])
    assert mean == pytest.approx((1 + math.erf(0.7 / 2)) * math.exp(0.7**2 / 2), rel=0.02)


def test_with_equal_peers_only_the_transfer_is_waited_for() -> None:
    it = replace(QUIET, payload=1_000_000, up=100_000.0 / GOODPUT, down=1_000_000.0)
    by_round = pairs_by_round(it)
    assert by_round.seconds == pytest.approx(10 * (20 + 10))
    assert by_round.idle_share == pytest.approx(1 / 3)
    assert groups(it).seconds == pytest.approx(10 * (20 + 2 * 63 / 64 * 10))
    overlapped = pairs(replace(it, overlap=True))
    assert overlapped.idle_share == 0
    assert overlapped.seconds == pytest.approx(200)
    assert overlapped.bytes_per_round > 0.8 * it.payload


def test_both_methods_send_what_the_codec_makes_and_the_papers_pairs_fp32() -> None:
    it = replace(QUIET, payload=1_000_000, up=100_000.0 / GOODPUT, down=1_000_000.0)
    quarter, whole = replace(it, coded=0.25), replace(it, payload=250_000)
    assert pairs(quarter) == pairs(whole) != pairs(it)
    assert groups(quarter) == groups(whole) != groups(it)
    assert pairs_by_round(quarter) == pairs_by_round(it)


def test_a_straggler_delays_a_group_and_hardly_the_pairs() -> None:
    it = replace(QUIET, peers=16, rounds=40, speeds=(*[1.0] * 15, 0.5), step_sigma=0.1)
    assert groups(it).idle_share > 0.4
    assert pairs(it).idle_share < 0.15


def test_losses_and_churn_cost_a_group_more() -> None:
    calm = replace(QUIET, payload=1_000_000, step_sigma=0.2)
    rough = replace(calm, loss=0.02, churn=0.02)
    cost = [method(rough).seconds / method(calm).seconds for method in (pairs, groups)]
    assert 1 < cost[0] < cost[1]
    assert pairs(rough).merged_share < pairs(calm).merged_share
    assert groups(rough).merged_share == 0.98 and groups(calm).merged_share == 1  # who is lost does not merge


@pytest.mark.parametrize("sigma", [0.0, 0.2])
def test_overlapped_peers_meet_and_wait_for_nothing_whatever_their_times(sigma: float) -> None:
    it = replace(QUIET, rounds=30, payload=1_000_000, up=1_000_000.0, step_sigma=sigma, overlap=True)
    found = pairs(it)
    assert found.merged_share > 0.8
    assert found.idle_share == pytest.approx(0, abs=1e-9)
    slow = pairs(replace(it, up=20_000.0))  # a transfer takes three inner phases
    assert slow.idle_share == pytest.approx(0, abs=1e-9)
    assert slow.merged_share > 0.6  # of the rounds: boundaries that are postponed are none


def test_at_the_end_a_running_swap_is_waited_for_and_the_last_ones_are_made() -> None:
    """The model was never idle: a run's end was not in it."""
    it = replace(QUIET, peers=8, payload=1_000_000, up=100_000.0 / GOODPUT, down=1_000_000.0)  # 10 s a swap
    assert 20 <= pairs(it).end_seconds <= 30  # log2 8, less the round before where it has merged
    overlapped = pairs(replace(it, overlap=True))
    assert 20 < overlapped.end_seconds <= 40
    assert overlapped.idle_share == 0
    assert overlapped.idle_in_all == pytest.approx(overlapped.end_seconds / (200 + overlapped.end_seconds))
    alone = pairs(replace(it, peers=3, speeds=(1.0, 0.5, 0.25)))  # the others train on for minutes
    assert alone.end_seconds <= 15


LARGE = Conditions(  # NoLoCo's 6.8B with its embeddings in fp32, 131,072 tokens a step at 4e14 operations a second
    peers=16, rounds=10, inner_steps=50, payload=4 * 9_640_000_000, step_seconds=24.0, up=12.5e6, down=12.5e6
)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_papers_6_8b_merges_over_100_mbit(overlap: bool) -> None:
    """A swap takes 3,856 s, three inner phases and a bit."""
    found = pairs(replace(LARGE, overlap=overlap))
    assert transfer(LARGE, LARGE.payload) == pytest.approx(3856)
    assert found.merged_share > 0.6
    assert (found.idle_share < 0.01) == overlap
    assert groups(replace(LARGE, max_phases=8.0)).merged_share == 1


def test_what_is_not_worth_it_costs_a_quarter_and_is_not_merged() -> None:
    slow = replace(LARGE, step_sigma=0.0, up=6.25e6)  # 7,712 s, and 4,800 are allowed
    assert pairs(slow).merged_share == groups(slow).merged_share == 0
    assert groups(slow).seconds == pytest.approx(10 * (1200 + 4800))
    waited = pairs_by_round(replace(slow, payload=0)).seconds
    assert waited < pairs(slow).seconds <= 10 * (1200 + 1200 + 10)
    assert pairs(replace(slow, max_phases=7.0)).merged_share > 0.5


def test_ten_thousand_peers() -> None:
    found = pairs(replace(QUIET, peers=10_000, rounds=5, step_sigma=0.3))
    assert found.merged_share > 0.8


def test_the_command_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.logs.setup", lambda *arguments: None)  # it would set up the whole process' logging
    words = ["simulate", "--network", "--replicas", "100", "--config", "configs/demo.yaml", "--rounds", "5"]
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--set", f"run.dir={tmp_path}"])
    assert end.value.code == 0
    figures = json.loads((tmp_path / "network.json").read_text())
    assert [row["method"] for row in figures["methods"]] == ["noloco", "noloco, pairs by round", "diloco"]
    assert figures["conditions"]["payload"] == 4 * 1_022_464
    assert figures["tree_to_pair"] > math.log2(100)
    assert "times as long as NoLoCo for 5 rounds of 100 peers" in capsys.readouterr().out


def test_figures_that_cannot_be_written_are_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.logs.setup", lambda *arguments: None)
    monkeypatch.setattr("peer.commands.simulate.command.set_aside", lambda *_: None)
    (tmp_path / "network.json").symlink_to("/dev/full")
    words = ["simulate", "--network", "--replicas", "4", "--config", "configs/demo.yaml", "--rounds", "2"]
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "--set", f"run.dir={tmp_path}"])
    said = capsys.readouterr()
    assert end.value.code == 1 and "times as long as NoLoCo for 2 rounds of 4 peers" in said.out
    assert said.err == f"error: cannot write the figures to {tmp_path / 'network.json'}: No space left on device\n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"peers": 1},
        {"peers": 10_001},
        {"rounds": 0},
        {"step_seconds": 0.0},
        {"up": math.inf},
        {"loss": 1.0},
        {"step_sigma": math.nan},
        {"latency": math.inf},
        {"speeds": (0.0,)},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        replace(QUIET, **wrong).check()
