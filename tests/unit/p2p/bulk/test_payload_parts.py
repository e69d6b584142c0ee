"""Which parts of a payload are asked for, and when it is whole: without threads and sockets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from peer.p2p.bulk.payload_parts import LEAST_WINDOW_PARTS, WINDOW_BYTES, PayloadParts, window

DIGEST = bytes(16)


def rooms(count: int, size: int = 1) -> Iterator[memoryview]:
    return repeat(memoryview(bytearray(size)), count)


def asked(payload: PayloadParts) -> list[int]:
    """The parts to ask for now."""
    return [part.number for part in iter(payload.next, None)]


def arrive(payload: PayloadParts, *numbers: int) -> None:
    for number in numbers:
        payload.take(number, bytearray(1), DIGEST)


def test_no_more_than_a_window_after_the_part_in_use_is_asked_for() -> None:
    size = WINDOW_BYTES // 8
    payload = PayloadParts(rooms(100, size))
    assert asked(payload) == list(range(8)) == list(range(window(size)))
    arrive(payload, *range(8))
    assert asked(payload) == [], "the reader has not taken them"
    payload.wanted = 3
    assert asked(payload) == [8, 9, 10]


def test_the_window_is_that_of_the_largest_part() -> None:
    """As the sender's, which refuses what is beyond it."""
    assert len(asked(PayloadParts(rooms(100, WINDOW_BYTES)))) == LEAST_WINDOW_PARTS
    short = memoryview(bytearray(1))
    mixed = PayloadParts([short, memoryview(bytearray(WINDOW_BYTES)), *[short] * 100])
    assert len(asked(mixed)) == LEAST_WINDOW_PARTS


def test_parts_of_a_lost_connection_are_asked_for_again_and_first() -> None:
    payload = PayloadParts(rooms(9))
    assert [payload.next() for _ in range(5)] == [(number, 1, 0) for number in range(5)]
    arrive(payload, 0, 2)
    for number in (4, 1):
        payload.give_back(number)
    assert [payload.next() for _ in range(3)] == [(1, 1, 1), (4, 1, 1), (5, 1, 1)]


def test_given_back_parts_are_asked_for_beyond_the_window_and_after_the_last_room() -> None:
    payload = PayloadParts(rooms(2, WINDOW_BYTES))
    assert asked(payload) == [0, 1] and payload.end == 2
    payload.give_back(1)
    assert asked(payload) == [1] and not payload.whole


def test_the_first_missing_part_is_the_first_that_has_not_come() -> None:
    payload = PayloadParts(rooms(4), first=10)
    assert payload.first_missing == 10
    assert asked(payload) == [10, 11, 12, 13]
    arrive(payload, 12, 10)
    assert payload.first_missing == 11
    arrive(payload, 11, 13)
    assert payload.first_missing == 14


def test_it_is_whole_when_all_have_come_and_there_is_no_further_room() -> None:
    payload = PayloadParts(rooms(2))
    assert [payload.next() for _ in range(2)] == [(0, 1, 0), (1, 1, 0)]
    arrive(payload, 1, 0)
    assert not payload.whole, "there may be further rooms"
    assert payload.next() is None and payload.whole
    other = PayloadParts(rooms(2))
    asked(other)
    arrive(other, 1)
    assert not other.whole
    arrive(other, 0)
    assert other.whole


def test_one_of_no_parts_is_whole_at_the_first_look() -> None:
    payload = PayloadParts((), first=7)
    assert not payload.arrived_or_absent(7)
    assert payload.next() is None
    assert payload.whole and payload.arrived_or_absent(7) and payload.claimed == 7


def test_the_reader_gets_the_room_and_the_data_of_each_part_and_knows_the_end() -> None:
    room, data = memoryview(bytearray(5)), bytearray(b"later")
    payload = PayloadParts([room])
    asked(payload)
    assert not payload.arrived_or_absent(0)
    payload.take(0, data, DIGEST)
    assert payload.arrived_or_absent(0)
    given = payload.give_out(0)
    assert given[0] is room and given[1] is data and given[2] == DIGEST
    assert not payload.arrived_or_absent(0) and payload.arrived_or_absent(1)


def test_a_part_of_a_payload_whose_reader_has_given_up_counts_for_nothing_in_the_next_one() -> None:
    """Its connection still runs: it may deliver the part, or be lost."""
    first = PayloadParts(rooms(5))
    late = asked(first)
    payload = PayloadParts(rooms(2), first.claimed)
    for number in late:
        payload.give_back(number)
    arrive(payload, *late)
    assert asked(payload) == [5, 6] and not any(map(payload.arrived_or_absent, late))
    arrive(payload, *late, 5)
    assert not payload.whole
    arrive(payload, 6)
    assert payload.whole
