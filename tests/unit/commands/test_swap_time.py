"""What a line means for a run: how long a swap takes, whether it fits, and which settings would make it fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from peer.commands.check.finding import Finding
from peer.commands.check.swap_time import MOST_WAITED, Line, bytes_of, seconds_of_a_step, swap
from peer.config.load import load
from peer.config.schema import Config
from peer.exchange.codec import size

MBIT = 125_000
NUMEL = 10_000_000
SLOW = Line(5 * MBIT, 100 * MBIT, 0.05)  # int8: 16.3 s, int4: 8.3 s, fp32: 64 s


def config(*sets: str) -> Config:
    return load(None, ["run.inner_steps=50", *sets], environment={})


def found(it: Config, step: float | None, line: Line = SLOW, members: int = 4) -> list[Finding]:
    return list(swap(it, NUMEL, line, line, step, members))


def one(*given: Any) -> Finding:
    (it,) = found(*given)
    return it


def test_a_swap_that_fits_says_its_share_of_a_phase() -> None:
    it = one(config(), 1.0)
    assert it.level == "ok" and "10.2 MB each way in int8 take about 16.5 s, 33% of an inner phase (50 s" in it.text


def test_a_swap_longer_than_a_phase_names_the_codec_that_fits_and_the_steps() -> None:
    it = one(config(), 0.2)
    assert it.level == "warn" and "boundaries are postponed" in it.text
    assert it.advice == (
        "run.exchange.codec=int4 (85.1%) in the whole swarm, or run.inner_steps=83 in the whole swarm"
    ), it.advice


@pytest.mark.parametrize("step", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("sets", [(), ("run.exchange.codec=none",), ("run.exchange.overlap=false",)])
def test_each_setting_that_is_named_makes_it_fit(sets: tuple[str, ...], step: float) -> None:
    it = one(config(*sets), step)
    assert it.level != "ok"
    for way in it.advice.split(", or "):
        settings = re.findall(r"run\.[a-z_.]+=\w+", way)
        assert settings
        mended = one(config(*sets, *settings), step)
        assert mended.level == "ok", (way, mended)


def test_int4_that_is_not_enough_is_named_with_the_steps_that_it_needs() -> None:
    it = one(config(), 0.02)
    assert "run.exchange.codec=int4 with run.inner_steps=426" in it.advice, it.advice


def test_a_swap_that_never_ends_in_time_is_a_failure() -> None:
    it = one(config(), 0.02, Line(MBIT, MBIT, 0.05))
    assert it.level == "fail" and "no swap ends in time" in it.text


def test_a_blocking_boundary_waits_for_its_swap() -> None:
    blocking = config("run.exchange.overlap=false")
    phase_seconds = SLOW.seconds(size("int8", NUMEL)) / MOST_WAITED
    assert one(blocking, 1.01 * phase_seconds / 50).level == "ok"
    assert "each boundary waits" in one(blocking, 0.9 * phase_seconds / 50).text


def test_without_a_step_the_seconds_are_said_and_no_share() -> None:
    it = one(config(), None)
    assert it.level == "ok" and "about 16.5 s" in it.text and "unknown" in it.text and "%" not in it.text


def test_own_limits_are_named() -> None:
    it = one(config("peer.network.max_upload=5mbit"), 0.2)
    assert "peer.network.max_upload (5mbit) higher here" in it.advice


def test_a_group_moves_twice_the_model_and_no_other_method_has_a_codec() -> None:
    diloco = config("run.outer={name: diloco}", "run.exchange.codec=none")
    assert bytes_of(diloco.run, NUMEL, 4) == 1.5 * 4 * NUMEL
    coded = diloco.run.model_copy(update={"exchange": diloco.run.exchange.model_copy(update={"codec": "int2"})})
    assert bytes_of(coded, NUMEL, 4) == pytest.approx(1.5 * 4 * NUMEL / 15.5, rel=1e-3)
    it = one(diloco, 1.0)
    assert "in a group of 4" in it.text and "codec" not in it.advice and "run.inner_steps=" in it.advice
    assert found(config("run.outer={name: local}"), 1.0) == []


def test_the_seconds_of_a_step_are_those_of_the_middle_member_that_has_made_one() -> None:
    run = config("run.batch_size=8", "run.data={name: stdlib, sequence_length: 128}").run
    assert seconds_of_a_step(run, [0.0, 512.0, 1024.0, 4096.0]) == 1.0
    assert seconds_of_a_step(run, [0.0]) is None
