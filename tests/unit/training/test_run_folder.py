"""The folder of a peer: who holds it, what is written there, and what the launcher reads out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.commands.local_swarm.summary import in_words, summarize
from peer.commands.local_swarm.tail import Tail
from peer.config.schema import Config
from peer.replica.inner_loop import InnerReport
from peer.rounds.contribution import Averaged
from peer.rounds.types import Outcome
from peer.telemetry.metrics import Metrics
from peer.telemetry.report import BoundaryReport, Reporter, RoundReport
from peer.telemetry.series import ACTIVITIES
from peer.training.run_folder import claim


def test_two_peers_of_one_machine_get_different_folders_and_the_same_again(tmp_path: Path) -> None:
    one, two = claim(tmp_path, None), claim(tmp_path, None)
    assert one.name != two.name
    one.release()
    assert claim(tmp_path, None).name == one.name


def report(number: int, outcome: Outcome = Outcome.MERGED, partner: str = "b") -> RoundReport:
    inner = InnerReport(10, 640, 4.0 - number / 10, 4.5 - number / 10, 1.0, 1e-3, 2.0, losses=10)
    partners = () if outcome is Outcome.ALONE else (partner,)
    averaged = Averaged(torch.zeros(1), outcome, partners, 100, 90, 0.5, distance=0.1)
    seconds = {**dict.fromkeys(ACTIVITIES, 0.0), "inner": 9.0, "match": 0.25, "exchange": 0.75}
    return RoundReport(BoundaryReport(number, 10 * number, 640 * number, inner), averaged, seconds, 0.1, 2)


def write(folder: Path, *reports: RoundReport, evals: int = 2) -> None:
    reporter = Reporter(folder, Metrics())
    for item in reports:
        reporter.round(item)
    for step in range(evals):
        reporter.evaluation(10 * step, 640 * step, 5.0 - step)


def test_a_round_is_one_object_with_the_promised_keys(tmp_path: Path) -> None:
    write(tmp_path, report(1))
    (row,) = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    promised = {"round", "step", "tokens", "train_loss", "partner", "outcome", "seconds", "bytes_sent", "staleness"}
    assert row.keys() >= promised | {"bytes_received"}
    assert (row["partner"], row["outcome"], row["seconds"]["exchange"]) == ("b", "merged", 0.75)


def test_a_resumed_peer_takes_back_what_it_will_do_again(tmp_path: Path) -> None:
    write(tmp_path, report(1), report(2), report(3))
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "cut')
    reporter = Reporter(tmp_path, Metrics())
    reporter.rewind(2, 5)
    reporter.round(report(3))
    rounds = [json.loads(line)["round"] for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert rounds == [1, 2, 3]
    assert len((tmp_path / "evals.jsonl").read_text().splitlines()) == 1


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path, report(1))
    path, tail = tmp_path / "rounds.jsonl", Tail("a", tmp_path)
    assert len(tail.poll()) == 1
    line = path.read_text()
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert tail.poll() == []
        file.write(line[20:])
        file.flush()
        assert len(tail.poll()) == 1
    path.write_text(line)
    assert len(tail.poll()) == 1 and tail.summary()["rounds"]["merged"] == 1


def test_the_summary_adds_up(tmp_path: Path) -> None:
    rounds = [report(1), report(2, Outcome.ALONE), report(3, partner="c"), report(4, Outcome.TIMEOUT)]
    write(tmp_path, *rounds)
    tail = Tail("a", tmp_path)
    tail.poll()
    row = tail.summary()
    assert row["rounds"] == {"merged": 2, "alone": 1, "timeout": 1, "refused": 0, "corrupt": 0, "poisoned": 0}
    assert row["partners"] == {"b": 1, "c": 1}
    assert row["idle_share"] == pytest.approx(0.1)
    assert (row["steps"], row["tokens"], row["bytes_sent"], row["bytes_received"]) == (40, 2560, 400, 360)
    assert (row["first_train_loss"], row["last_train_loss"]) == (4.4, 3.6)
    assert (row["first_val_loss"], row["val_loss"]) == (5.0, 4.0)


def test_a_run_that_never_began_has_a_summary_too(tmp_path: Path) -> None:
    summary: dict[str, Any] = summarize(Config(), [Tail("a", tmp_path / "a")], 1.0)
    assert summary["swarm"]["val_loss_averaged_model"] is None
    assert "0 tokens" in in_words(summary)
