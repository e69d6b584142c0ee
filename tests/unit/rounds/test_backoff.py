"""Who is left out, for how long, and that the list cannot be made to grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peer.rounds.backoff import DOUBLINGS, FORGIVEN, KEPT, MEMORY, PeerBackoff
from peer.rounds.types import Newest


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_offence_doubles_the_time_up_to_a_bound() -> None:
    clock = Clock()
    grudges = PeerBackoff(clock)
    assert [grudges.note("a", 4.0, offence=True) for _ in range(DOUBLINGS + 3)] == [4, 8, 16, 32, 64, 128, 128, 128]
    clock.now += 127.0
    assert grudges.avoided("a") and not grudges.welcome("a")
    clock.now += 2.0
    assert not grudges.avoided("a") and grudges.welcome("a")


def test_an_offence_is_forgotten_in_the_end() -> None:
    clock = Clock()
    grudges = PeerBackoff(clock)
    grudges.note("a", 4.0, offence=True)
    clock.now += 4.0 * MEMORY + 1
    assert grudges.note("a", 4.0, offence=True) == 4.0


def test_it_is_forgiven_a_few_times_and_not_forgotten() -> None:
    grudges = PeerBackoff(Clock())
    grudges.forgive("nobody")
    for offence in range(FORGIVEN + 2):
        assert grudges.note("a", 4.0, offence=True) == 4.0 * 2**offence
        grudges.forgive("a")
        assert grudges.avoided("a") == (offence >= FORGIVEN)


def test_who_only_did_not_answer_is_welcome_when_it_comes_by_itself() -> None:
    grudges = PeerBackoff(Clock())
    assert grudges.note("a", 4.0, offence=False) == 4.0
    assert grudges.avoided("a")
    assert grudges.welcome("a")
    assert not grudges.avoided("a")
    assert grudges.note("a", 4.0, offence=False) == 4.0  # and it never grows


def test_silence_does_not_make_up_for_an_offence() -> None:
    clock = Clock()
    grudges = PeerBackoff(clock)
    grudges.note("a", 60.0, offence=True)
    clock.now += 10.0
    assert grudges.note("a", 4.0, offence=False) == 50.0
    assert not grudges.welcome("a")
    clock.now += 45.0
    assert grudges.avoided("a")


@given(st.lists(st.text(max_size=3), max_size=50))
def test_names_without_end_are_not_kept(names: list[str]) -> None:
    grudges = PeerBackoff(Clock())
    for index in range(KEPT):
        grudges.note(str(index), 1.0, offence=True)
    for name in names:
        grudges.note(f"new {name}", 1.0, offence=True)
        assert grudges.avoided(f"new {name}")
    assert len(grudges._held) <= KEPT


def test_the_ids_that_were_set_last_stay() -> None:
    kept = Newest[int](2)
    for number, peer_id in enumerate("abac"):
        kept[peer_id] = number
    assert kept == {"a": 2, "c": 3}
