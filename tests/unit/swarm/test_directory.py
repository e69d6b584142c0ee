"""What a peer writes of itself, and until when; and what another process with its key has written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from peer import clock
from peer.p2p.dht import search
from peer.p2p.node import RPC_TIMEOUT
from peer.swarm.directory import records
from peer.swarm.directory.directory import SUSPENDED_SECONDS, WAITING_SECONDS, Members
from peer.swarm.directory.duplicate_identity import DUPLICATE_LOOK, LOOK_PAUSE, duplicate_of
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import LIFETIME, RUNS, MemberRecord
from tests.unit.parts import member_record
from tests.unit.virtual import run, took

AHEAD = 600.0  # seconds
DIRECT = "/ip4/10.0.0.9/tcp/31337"
RELAYED = "/ip4/10.0.0.1/tcp/4001/p2p/QmRelay/p2p-circuit/p2p/QmA"  # nobody calls it: only its record decides


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The end of each record that was written."""
    ends: list[float] = []

    async def write(_: Any, key: str, __: Any, record: search.Held, nodes: Iterable[Any]) -> set[Any]:
        if key != RUNS:
            ends.append(record.expires)
        return set(nodes)

    async def keepers(*_: Any) -> list[str]:
        return ["QmB"]

    monkeypatch.setattr(search, "write", write)
    monkeypatch.setattr(search, "keepers", keepers)
    return ends


def test_a_peer_whose_clock_was_ahead_is_seen_again_when_it_is_set(
    written: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node keeps a record that lasts for so long, and for ten minutes each new one was to last longer still."""
    node: Any = SimpleNamespace(peer_id="QmA", subkey="QmA", anchors=list, dht=None)
    members, record, now = Members(node, "demo", lambda: member_record("QmA")), member_record("QmA"), clock.unix()

    def at(seconds: float) -> float:
        """The end of what is written then; 0 when nothing is."""
        written.clear()
        monkeypatch.setattr(clock, "unix", lambda: now + seconds)
        asyncio.run(members._store(record))
        return max(written) - now if written else 0.0

    assert at(AHEAD) == pytest.approx(AHEAD + LIFETIME)
    assert at(1.0) == pytest.approx(1.0 + LIFETIME)
    assert at(0.0) == 0.0  # a clock that is set by a second has no need of it


def test_who_has_left_says_nothing_more(written: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its announcing went on while it left, and others looked for it until the record ended."""
    node: Any = SimpleNamespace(peer_id="QmA", subkey="QmA", anchors=list, dht=None)
    node.call = lambda work, _: asyncio.run(work)
    members = Members(node, "demo", lambda: member_record("QmA"))
    members.announce()
    members.leave()
    written.clear()
    asyncio.run(members._tell())
    assert not written


def test_a_member_that_is_dropped_while_its_name_is_looked_up_costs_the_training_nothing() -> None:
    """The network thread drops who does not answer: the training thread ended with a KeyError."""

    class Shrinking(dict[str, Entry]):
        """Has each entry until one asks whether it has it."""

        def __contains__(self, peer_id: object) -> bool:
            return self.pop(str(peer_id), None) is not None

    node: Any = SimpleNamespace(peer_id="QmA", subkey="QmA", anchors=list, dht=None)
    members = Members(node, "demo", lambda: member_record("QmA"))
    record = member_record("QmB")
    members.known = Shrinking(QmB=Entry(record, clock.unix() + LIFETIME))
    assert members.name_of("QmB") == record.name


async def test_a_member_that_is_dropped_while_records_are_read_ends_no_look() -> None:
    """The training thread drops a donor that does not answer."""

    class Dropping(float):
        """The end of a record; another member is dropped when it is looked at."""

        def __gt__(self, now: float) -> bool:
            members.forget("QmC")
            return True

    node: Any = SimpleNamespace(peer_id="QmA", subkey="QmA", anchors=list, dht=None)
    members = Members(node, "demo", lambda: member_record("QmA"))
    members.known = {name: Entry(member_record(name), Dropping()) for name in ("QmB", "QmC", "QmD")}
    await members._take_in([], 1)
    assert {"QmB", "QmD"} <= members.known.keys()


@pytest.mark.parametrize("seconds", [SUSPENDED_SECONDS / 2, 3600.0])
async def test_a_machine_that_falls_asleep_while_the_directory_is_read_has_slept(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the pause after the work was measured: the peer trained on with the learning rate of that time, alone."""

    async def nothing() -> None: ...

    node: Any = SimpleNamespace(peer_id="QmA", subkey="QmA", anchors=list, dht=None)
    woken, now = list[float](), clock.unix
    members = Members(node, "demo", lambda: member_record("QmA"), woken.append)

    async def falls_asleep(_: int) -> None:
        patched.setattr(clock, "unix", lambda: now() + seconds)

    members.look, members._tell, members._get_to_know = falls_asleep, nothing, nothing  # type: ignore[method-assign]
    with monkeypatch.context() as patched:
        announcing = asyncio.ensure_future(members._keep_announcing())
        await asyncio.sleep(2 * WAITING_SECONDS)
        announcing.cancel()
    assert (woken == [pytest.approx(seconds, abs=0.5)]) == (seconds > SUSPENDED_SECONDS)


async def test_an_error_in_what_a_peer_says_of_itself_costs_one_period(written: list[float]) -> None:
    """It ended the announcing, and 30 seconds later nobody knew this peer."""
    node: Any = SimpleNamespace(peer_id="QmA", subkey="QmA", anchors=list, dht=None)
    described = list[bool]()

    def describe() -> MemberRecord:
        described.append(True)
        if len(described) == 1:
            raise ZeroDivisionError
        return member_record("QmA")

    announcing = asyncio.ensure_future(Members(node, "demo", describe)._keep_announcing())
    await asyncio.sleep(10.0)
    announcing.cancel()
    assert written


# -- another process with the same key


def record_at(*addresses: str, **changes: str) -> MemberRecord:
    return member_record("QmA").model_copy(update={"addresses": list(addresses), **changes})


def duplicate_in(
    directory: Callable[[float], tuple[MemberRecord, float] | None], answers_for: float = 1e9
) -> tuple[MemberRecord | None, float]:
    """What node QmA, at ``DIRECT``, takes for another process with its key, and the seconds that it looked for one.

    ``directory``: the record in it and the end of that, by the seconds since the look began; it answers for
    ``answers_for`` of them.
    """

    async def look() -> tuple[MemberRecord | None, float]:
        began = clock.monotonic()

        async def get_many(keys: list[str], **_: Any) -> dict[str, Any]:
            since = clock.monotonic() - began
            if since >= answers_for:
                await asyncio.sleep(1e4)
            entry = directory(since)
            if entry is None:
                return dict.fromkeys(keys)
            record, end = entry
            value = {record.peer_id: SimpleNamespace(value=records.encode(record), expiration_time=end)}
            return {**dict.fromkeys(keys), keys[0]: SimpleNamespace(value=value)}

        node: Any = SimpleNamespace(peer_id="QmA", addresses=[DIRECT], dht=SimpleNamespace(get_many=get_many))
        return await duplicate_of(node, "demo"), clock.monotonic() - began

    return run(look())


def test_a_record_that_is_written_again_is_of_another_process() -> None:
    other, seconds = duplicate_in(lambda since: (record_at(RELAYED), LIFETIME + (8.0 if since > 8.0 else 0.0)))
    assert other == record_at(RELAYED) and seconds == took(8.0, LOOK_PAUSE)


def test_the_record_that_a_killed_peer_has_left_does_not_keep_it_from_its_next_start() -> None:
    other, seconds = duplicate_in(lambda _: (record_at(RELAYED), LIFETIME))
    assert other is None and seconds == took(DUPLICATE_LOOK, LOOK_PAUSE)


@pytest.mark.parametrize(
    "record",
    [None, record_at(RELAYED, state="left"), record_at(RELAYED, peer_id="QmB"), record_at(DIRECT), record_at()],
    ids=["none", "it has left", "another member's", "at our own address", "without an address"],
)
def test_where_no_other_process_can_live_there_is_no_wait(record: MemberRecord | None) -> None:
    other, seconds = duplicate_in(lambda since: None if record is None else (record, LIFETIME + since))
    assert other is None and seconds == took(0.0)


@pytest.mark.parametrize("answers_for", [0.0, 5.0])
def test_a_directory_that_does_not_answer_keeps_no_peer_from_its_start(answers_for: float) -> None:
    other, seconds = duplicate_in(lambda _: (record_at(RELAYED), LIFETIME), answers_for)
    assert other is None and seconds == took(answers_for + 3 * RPC_TIMEOUT, LOOK_PAUSE)
