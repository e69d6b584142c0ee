"""How many parts of an overlapped swap are opened at each inner step: without threads and a partner."""

from __future__ import annotations

import pytest

from peer.exchange.pair.mailbox import LEAST_OPEN, OpeningPace


def test_as_many_are_open_as_land_in_two_inner_steps() -> None:
    pace, opened, received, free = OpeningPace(most=64), 0, 0, []
    for landed in (0, 2, 5, 7):  # since the step before
        received += landed
        free.append(pace.free(opened, received, received))
        opened += free[-1]
        assert opened - received == max(LEAST_OPEN, 2 * landed + 1)
    assert free == [2, 5, 11, 11]
    assert pace.landing == 14 / 4


@pytest.mark.parametrize(("received", "sent", "free"), [(10, 10, 64), (10, 3, 57), (0, 10, 54)])
def test_a_part_that_was_not_both_sent_and_received_counts_for_the_most(received: int, sent: int, free: int) -> None:
    assert OpeningPace(64).free(10, received, sent, idle=True) == free
    assert OpeningPace(64, usual=1000).free(10, received, sent) == free


def test_at_a_partner_from_which_nothing_lands_two_stay_open() -> None:
    pace = OpeningPace(64)
    assert [pace.free(opened, 0, opened) for opened in (0, 2, 2)] == [2, 0, 0]
    assert pace.landing == 0


def test_the_first_step_opens_what_the_last_swap_would_have_opened() -> None:
    pace = OpeningPace(64, usual=10)
    assert pace.landing == 10, "a swap that nobody joined tells nothing new"
    assert pace.free(0, 0, 0, idle=True) == 64 and pace.landing == 10
    assert pace.free(0, 0, 0) == 21


def test_time_without_inner_steps_is_no_step() -> None:
    """Else the next swap would begin at a fraction of the rate."""
    pace = OpeningPace(64)
    pace.free(0, 0, 0)
    for received in (4, 8, 12):
        assert pace.free(20, received, received, idle=True) == 64 - (20 - received)
    assert pace.free(20, 12, 12) == 25 - 8
    assert pace.landing == 6


def test_never_fewer_than_none() -> None:
    assert OpeningPace(2).free(5, 0, 0) == OpeningPace(2).free(5, 0, 0, idle=True) == 0


@pytest.mark.parametrize("latency", [1, 4, 9])  # usual inner steps
@pytest.mark.parametrize("long", [0, 70])  # every so many steps one takes ten times as long, as with an evaluation
def test_a_line_that_takes_longer_than_a_step_is_filled_all_the_same(latency: int, long: int) -> None:
    """Parts that landed in one inner step were the measure: with four steps on the way a swap took twice as long."""
    rate, parts, usual, took = 3, 600, 0.0, 0
    for _ in range(3):  # each swap begins with what the last one has learned
        pace, opened, landing, received, took, steps = OpeningPace(10_000, usual), 0, list[float](), 0, 0, 0
        while received < parts:
            received = sum(at <= took for at in landing)
            for _ in range(min(pace.free(opened, received, received), parts - opened)):
                landing.append(max(took + latency, landing[-1] + 1 / rate if landing else 0))
                opened += 1
            steps += 1
            took, usual = took + (10 if long and steps % long == 20 else 1), pace.landing
    stood_still = 9 * ((steps + long - 20) // long) if long else 0  # nobody opens parts in the middle of a step
    assert took <= 1.15 * (parts / rate + latency) + stood_still
    assert pace.landing <= 2 * rate * max(latency, 1) + 1, "no more are open than the line holds"
