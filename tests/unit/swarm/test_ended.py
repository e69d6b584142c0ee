"""What a bootstrap node tells ``noloco-peer status`` of runs that have ended, and what is believed of an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dht_bootstrap.watch import Watch
from peer import clock
from peer.p2p.stream import MESSAGE_CAP, MESSAGE_TIMEOUT, Stream, StreamLost
from peer.swarm.directory import ended
from peer.swarm.directory.ended import ENDED_PEERS, ENDED_RUNS, EndedRun, NoMore, ended_runs, last_peer
from peer.swarm.directory.reader import Entry
from peer.swarm.directory.records import LIFETIME, MemberRecord, Report
from tests.unit.parts import member_record
from tests.unit.virtual import run, stream_pair

ADDRESS = "/ip4/10.0.0.7/tcp/31337/p2p/QmB"
Answer = Callable[[Stream], Awaitable[None]]


def asked(answer: Answer, *more: str) -> Any:
    """What an onlooker knows after it has asked nodes that ``answer``, the seconds that it took, and its clock."""
    tasks: list[asyncio.Task[None]] = []

    async def scene() -> Any:
        async def open_to(peer_id: str, protocol: str) -> Stream:
            assert protocol == ended.ENDED_PROTOCOL
            if peer_id != "QmB":
                raise StreamLost("protocol not supported")  # a member
            ours, theirs = await stream_pair()
            tasks.append(asyncio.ensure_future(answer(theirs)))  # type: ignore[arg-type]
            return ours

        node: Any = SimpleNamespace(open=open_to)
        began = clock.monotonic()
        found = await ended_runs(node, [*more, ADDRESS])
        return found, clock.monotonic() - began, clock.unix()

    return run(scene())


def member(number: int, **changes: Any) -> MemberRecord:
    return member_record(f"Qm{number}").model_copy(update=changes)


def watched(now: float, *runs: list[MemberRecord]) -> Watch:
    """A bootstrap node that has seen ``runs`` end 100 seconds ago; the last of their peers has withdrawn its record."""
    watch = Watch(SimpleNamespace(failure=""))  # type: ignore[arg-type]
    names = [f"run-{number}" for number in range(len(runs))]
    found = {
        name: {it.peer_id: Entry(it, now - 110 + LIFETIME) for it in those}
        for name, those in zip(names, runs, strict=True)
    }
    watch.see({**found, "alive": {"Qm1": Entry(member(1), now + LIFETIME)}}, now - 110)
    left = {}
    for name, those in found.items():
        last = list(those.values())[-1].record
        left[name] = {last.peer_id: Entry(last.model_copy(update={"state": "left"}), now - 100 + LIFETIME)}
    watch.see({**left, "alive": {"Qm1": Entry(member(1), now + LIFETIME)}}, now - 100)
    return watch


def test_an_onlooker_learns_the_last_figures_of_what_has_ended_and_nothing_of_what_lives() -> None:
    report = Report(tokens=5, train_loss=1.5, partners=("Qm2",))
    first = [member(1, step=70, report=report, metrics="10.0.0.7:9464"), member(2, step=71)]
    watch = watched(time.time(), first, [member(3)])
    found, _, now = asked(watch.tell_of_ended, "/ip4/10.0.0.8/tcp/31338/p2p/QmMember")
    assert found.keys() == {"run-0", "run-1"}
    at, entries = found["run-0"]
    assert now - at == pytest.approx(100, abs=60)
    assert {key: (it.record.step, it.record.state) for key, it in entries.items()} == {
        "Qm1": (70, "training"),
        "Qm2": (71, "left"),
    }
    assert entries["Qm1"].record.report == report and entries["Qm1"].record.metrics is None
    assert not any(it.is_live(now) for it in entries.values())


def test_the_largest_run_fits_into_a_message() -> None:
    name = "n" * 64
    report = Report(
        version="v" * 24,
        **dict.fromkeys(("tokens", "members", "merges"), 2**53),
        **dict.fromkeys(("train_loss", "val_loss"), -3.4028234663852886e38),
        **dict.fromkeys(("seconds", "idle_seconds", "merged_ago"), 1234567890.1234567),
        partners=(name,) * 3,
        refused=((name, 2**53),) * 2,
    )
    largest = MemberRecord(
        peer_id="p" * 128,
        name=name,
        addresses=["a" * 128] * 8,
        config="c" * 64,
        state="training",
        step=2**53,
        round=2**53,
        tokens_per_second=123456789012.34567,
        metrics="m" * 128,
        report=report,
        taken=2**53,
    )
    peers = [last_peer(largest, left=False, age=1234567890.1234567) for _ in range(ENDED_PEERS)]
    text = EndedRun(run=name, age=1e10, peers=peers).model_dump_json()
    assert EndedRun.model_validate_json(text).peers == peers
    assert MESSAGE_CAP / 2 < len(text) < MESSAGE_CAP


def told(number: int = 0, count: int = 1) -> EndedRun:
    peers = [last_peer(member(it), left=False, age=5.0) for it in range(count)]
    return EndedRun(run=f"run-{number}", age=5.0, peers=peers)


async def too_many(stream: Stream) -> None:
    for number in range(100):
        await stream.send(told(number), 5)


async def silent_after_one(stream: Stream) -> None:
    await stream.send(told(), 5)
    await asyncio.sleep(3600)


async def gone_after_one(stream: Stream) -> None:
    await stream.send(told(), 5)
    stream.close()


async def nonsense_after_one(stream: Stream) -> None:
    await stream.send(told(), 5)
    text = told().model_dump_json().replace('"tokens_per_second":1.0', '"tokens_per_second":1e300')
    await stream.write(len(text).to_bytes(4, "big") + text.encode(), 5)


async def announces_a_gigabyte(stream: Stream) -> None:
    await stream.write((2**30).to_bytes(4, "big"), 5)
    await asyncio.sleep(3600)


async def has_none(stream: Stream) -> None:
    await stream.send_last(NoMore(), 5)


@pytest.mark.parametrize(
    ("answer", "runs"),
    [
        (too_many, ENDED_RUNS),
        (silent_after_one, 1),
        (gone_after_one, 1),
        (nonsense_after_one, 1),
        (announces_a_gigabyte, 0),
        (has_none, 0),
    ],
)
def test_an_answer_is_believed_within_bounds_and_waited_for_within_seconds(answer: Answer, runs: int) -> None:
    found, seconds, _ = asked(answer)
    assert len(found) == runs and seconds < 2 * MESSAGE_TIMEOUT
