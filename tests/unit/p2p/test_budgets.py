"""What others may use of a node, each of them and all together."""

from __future__ import annotations

import pytest

from peer import clock
from peer.p2p.budgets import Limit, Places, Rate, Spending
from peer.rounds.backoff import Proven


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: time[0])
    return time


def test_an_id_spends_its_burst_and_then_its_rate(now: list[float]) -> None:
    spending = Spending(Rate(each=2, all=100, burst=5), Proven())
    assert [spending.spend("a") for _ in range(11)] == [True] * 10 + [False]
    now[0] += 1.0
    assert [spending.spend("a") for _ in range(3)] == [True, True, False]
    assert spending.spend("b", 10) and not spending.spend("b", 0.5)
    now[0] += 1e6
    assert not spending.spend("a", 11), "no more than the burst is saved"


def test_who_has_no_more_is_told_when_it_has(now: list[float]) -> None:
    spending = Spending(Rate(each=2, all=4, burst=5), Proven())
    assert spending.wait("a", 10) == 0
    assert spending.wait("a") == 0.5
    assert spending.left("a") == 0 and spending.left("b") == 10
    assert spending.wait("b", 10) == 0 and spending.wait("c") == 0.25, "all have no more"
    assert spending.left("c") == 0
    now[0] += 0.5
    assert spending.wait("a") == 0


def test_a_crowd_of_ids_spends_what_is_for_all_and_not_the_share_of_the_proven(now: list[float]) -> None:
    proven = Proven()
    proven.add("friend")
    spending = Spending(Rate(each=2, all=6, burst=5), proven)
    assert sum(spending.spend(f"sybil{number}") for number in range(1000)) == 30
    assert [spending.spend("friend") for _ in range(11)] == [True] * 10 + [False]
    assert not spending.spend("newcomer")
    now[0] += 0.5
    assert spending.spend("newcomer")


def test_places_are_for_each_and_for_all_and_come_back(now: list[float]) -> None:
    proven = Proven()
    places, held = Places(Limit(each=2, all=3), proven), dict.fromkeys("abcdefgh", True)
    assert [places.take("one", lambda name=name: held[name]) for name in "abc"] == [True, True, False]  # type: ignore[misc]
    assert places.take("two", lambda: held["d"])
    assert not places.take("three", lambda: held["e"]), "all that are not proven have three"
    proven.add("one")
    assert places.take("three", lambda: held["e"]) and places.take("four", lambda: held["f"])
    assert not places.take("five", lambda: True)
    held["d"] = False
    assert places.take("five", lambda: True)


def test_who_fails_a_peer_is_proven_no_more() -> None:
    proven = Proven()
    for number in range(300):
        proven.add(f"id{number}")
    assert "id299" in proven and "id0" not in proven
    proven.discard("id299")
    assert "id299" not in proven
