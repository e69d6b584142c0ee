"""A stream keeps its deadlines and its caps, whatever the other side sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import clock
from peer.p2p.budgets import STREAMS
from peer.p2p.dial import parsed_id
from peer.p2p.event_loop import LoopThread
from peer.p2p.node import Node
from peer.p2p.payload import DIGEST_BYTES, CorruptPart, fp32_parts, receive_fp32, send_parts
from peer.p2p.settings import NodeSettings
from peer.p2p.stream import (
    BAD_MESSAGE_CAP,
    MESSAGE_CAP,
    UNSENT_SECONDS,
    WRITE_CHUNK,
    BadMessage,
    Message,
    Stream,
    StreamLost,
)
from peer.rounds.contribution import Vector
from peer.swarm.pairing.agreement import PROPOSAL_ANSWER, Propose
from tests.unit.virtual import run, stream_pair, took

ID = "QmYbAnMcVeRLg6kmQ1Z4XT2Q4aBH3VTsd3GRYc7HZoFSer"


class Hello(Message):
    kind: Literal["hello"] = "hello"
    words: str


@pytest.mark.parametrize("play", [run, asyncio.run], ids=["memory", "sockets"])
def test_a_message_arrives_and_its_bytes_are_counted(play: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def talk() -> None:
        one, two = await stream_pair()
        await one.send(Hello(words="good day"), 1)
        assert (await two.receive(Hello, 1)).words == "good day"
        assert one.sent == two.received > 20

    play(talk())


@pytest.mark.parametrize(
    "body", ['{"kind":"hello"}', '{"kind":"hello","words":1}', '{"kind":"hello","words":"","x":1}']
)
async def test_a_message_of_another_shape_is_refused(body: str) -> None:
    one, two = await stream_pair()
    await one.write(len(body).to_bytes(4, "big") + body.encode(), 1)
    with pytest.raises(BadMessage):
        await two.receive(Hello, 1)


async def test_what_is_said_of_a_bad_message_is_short() -> None:
    """The sender's own keys are a part of it: one message filled a log with 60 kB."""
    one, two = await stream_pair()
    body = json.dumps({"kind": "hello", "words": "", "x" * 60_000: 1}).encode()
    await one.write(len(body).to_bytes(4, "big") + body, 1)
    with pytest.raises(BadMessage) as raised:
        await two.receive(Hello, 1)
    assert len(str(raised.value)) == BAD_MESSAGE_CAP


async def test_a_length_above_the_cap_is_refused_before_anything_is_read() -> None:
    one, two = await stream_pair()
    await one.write((MESSAGE_CAP + 1).to_bytes(4, "big"), 1)
    with pytest.raises(BadMessage, match="above the cap"):
        await two.receive(Hello, 1)


async def test_ones_own_message_above_the_cap_is_not_sent() -> None:
    one, _ = await stream_pair()
    with pytest.raises(BadMessage):
        await one.send(Hello(words="x" * MESSAGE_CAP), 1)


@pytest.mark.parametrize("reading", ["message", "bytes"])
async def test_silence_ends_at_the_deadline(reading: str) -> None:
    _one, two = await stream_pair()
    began = clock.monotonic()
    with pytest.raises(TimeoutError):
        await (two.receive(Hello, 0.2) if reading == "message" else two.read_into(memoryview(bytearray(8)), 0.2))
    assert clock.monotonic() - began == took(0.2)


async def test_bytes_that_come_now_and_then_do_not_make_a_messages_deadline_longer(thread: LoopThread) -> None:
    async def dribble(stream: Stream) -> None:
        await stream.write((100).to_bytes(4, "big"), 1)
        for _ in range(100):
            await stream.write(b"x", 1)
            await asyncio.sleep(0.1)

    began = clock.monotonic()
    one, two = await stream_pair()
    thread.background(dribble(one))
    with pytest.raises(TimeoutError):
        await two.receive(Hello, 1.0)
    assert clock.monotonic() - began == took(1.0)


async def test_who_sends_the_last_message_waits_for_the_others_end_and_no_longer() -> None:
    began = clock.monotonic()
    one, _two = await stream_pair()
    await one.send_last(Hello(words="good night"), 0.5)
    assert clock.monotonic() - began == took(0.5)


async def test_a_reader_that_never_reads_ends_the_writer_at_its_deadline() -> None:
    one, _two = await stream_pair()
    began = clock.monotonic()
    with pytest.raises(TimeoutError):
        for _ in range(100):
            await one.write(bytes(1 << 20), 0.3)
    assert clock.monotonic() - began == took(0.3)


def test_an_ended_stream_is_lost_in_both_directions(real_thread: LoopThread) -> None:
    """What asyncio's own transports say then."""

    async def read() -> None:
        one, two = await stream_pair()
        one.close()
        one.close()
        await two.receive(Hello, 1)

    async def write() -> None:
        one, two = await stream_pair()
        two.close()
        for _ in range(100):
            await one.write(bytes(1 << 16), 1)
            await asyncio.sleep(0)

    for work in (read, write):
        with pytest.raises(StreamLost):
            real_thread.call(work(), 5)


@pytest.mark.real_time
@pytest.mark.parametrize("unsent", [0, 10**7])
async def test_a_stream_ends_for_the_other_side_although_a_forked_process_has_a_copy_of_it(unsent: int) -> None:
    """A worker of a data loader: the other side waited for its whole deadline. All that was written still arrives."""
    one, two = await stream_pair()
    with contextlib.closing(one.writer.get_extra_info("socket").dup()) as copy:
        one.writer.write(bytes(unsent))
        assert bool(one.writer.transport.get_write_buffer_size()) == bool(unsent)
        one.close()
        if unsent:
            await two.read_into(memoryview(bytearray(unsent)), 30)
            copy.close()
        with pytest.raises(StreamLost):
            await two.receive(Hello, 30)


@pytest.mark.real_time
@pytest.mark.parametrize("reads", [True, False], ids=["late", "never"])
async def test_a_closed_stream_gives_up_what_the_other_side_does_not_take(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file stayed open for as long as the other side liked. A forked process has a copy of it."""
    loop, timers, complaints = asyncio.get_running_loop(), list[tuple[Any, ...]](), list[Any]()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    one, two = await stream_pair()
    held = one.writer.get_extra_info("socket")
    with contextlib.closing(held.dup()), monkeypatch.context() as patched:
        one.writer.write(bytes(10**7))
        patched.setattr(loop, "call_later", lambda *timer: timers.append(timer))
        one.close()
        patched.undo()
        await asyncio.sleep(0)
        assert one.closed and one.holds_file and held.fileno() >= 0
        ((seconds, give_up),) = timers
        assert seconds == UNSENT_SECONDS
        if reads:
            await two.read_into(memoryview(bytearray(10**7)), 30)
        give_up()
        await one.writer.wait_closed()
        assert not one.holds_file and held.fileno() < 0
        if not reads:
            with pytest.raises(StreamLost):
                await two.read_into(memoryview(bytearray(10**7)), 30)
    assert not complaints


def test_who_reads_nothing_holds_the_place_of_each_stream_until_its_file_is_closed() -> None:
    """A handler ends and closes its stream: 40 places were given to an id that may have 32, and 40 files were open."""
    handlers: list[Any] = []
    kept: list[Stream] = []

    async def add_binary_stream_handler(_: str, handle: Any) -> None:
        handlers.append(handle)

    async def answers(stream: Stream) -> None:
        with contextlib.closing(stream):
            kept.append(stream)
            stream.writer.write(bytes(10**6))

    async def calls(count: int) -> list[Stream]:
        ends = []
        for _ in range(count):
            here, there = await stream_pair()
            await handlers[0](SimpleNamespace(peer_id=parsed_id(ID), addr=""), here.reader, here.writer)
            ends.append(there)
        return ends

    async def talk(node: Node) -> None:
        await node.serve("p", answers)
        ends = await calls(STREAMS.each + 1)
        assert len(kept) == STREAMS.each
        await ends[0].read_into(memoryview(bytearray(10**6)), 30)
        await kept[0].writer.wait_closed()
        await calls(2)
        assert len(kept) == STREAMS.each + 1

    node = Node(NodeSettings(None, "10.0.0.9", 0))
    node._p2p = SimpleNamespace(add_binary_stream_handler=add_binary_stream_handler)  # type: ignore[assignment]
    try:
        node.call(talk(node), 120)
    finally:
        node.close()


@settings(max_examples=150)
@given(data=st.binary(max_size=200), framed=st.booleans())
def test_random_bytes_are_bad_or_lost_and_nothing_else(data: bytes, framed: bool) -> None:
    async def talk() -> None:
        for kinds in (Hello, Propose, PROPOSAL_ANSWER):
            one, two = await stream_pair()
            await one.write((len(data).to_bytes(4, "big") if framed else b"") + data, 1)
            one.close()
            with pytest.raises((BadMessage, StreamLost)):
                await two.receive(kinds, 1)  # type: ignore[arg-type]
            two.close()

    run(talk())


@settings(max_examples=30)
@given(numel=st.integers(1, 3000), flip=st.none() | st.integers(0, 10**6))
def test_a_part_arrives_whole_or_is_noticed(numel: int, flip: int | None) -> None:
    """A flipped bit in the part or in its digest."""

    async def transfer(vector: torch.Tensor, out: torch.Tensor) -> None:
        one, two = await stream_pair()
        if flip is not None:
            _flip_one_bit(one, flip % (4 * numel + DIGEST_BYTES))
        try:
            await asyncio.gather(send_parts(one, fp32_parts(Vector(vector)), 1), receive_fp32(two, out, 1))
        finally:
            one.close()
            two.close()

    vector, out = torch.randn(numel), torch.empty(numel)
    if flip is None:
        run(transfer(vector, out))
        assert torch.equal(vector, out)
    else:
        with pytest.raises(CorruptPart, match="part 0 does not match its digest"):
            run(transfer(vector, out))


def _flip_one_bit(stream: Stream, place: int) -> None:
    write, sent = stream.write, 0

    async def flipped(data: bytes, timeout: float) -> None:
        nonlocal sent
        changed = bytearray(data)
        if 0 <= place - sent < len(data):
            changed[place - sent] ^= 1
        sent += len(data)
        await write(bytes(changed), timeout)

    stream.write = flipped  # type: ignore[method-assign]


async def test_a_slow_reader_is_waited_for_as_long_as_it_reads() -> None:
    """The deadline is for a silent line, and one part may take longer than that on a slow one."""
    one, two = await stream_pair()
    out = memoryview(bytearray(32 * WRITE_CHUNK))

    async def read() -> None:
        for start in range(0, len(out), WRITE_CHUNK):
            await asyncio.sleep(0.5)
            await two.read_into(out[start : start + WRITE_CHUNK], 1)

    began = clock.monotonic()
    await asyncio.gather(one.write(bytes(len(out)), 2.0), read())
    assert clock.monotonic() - began == took(32 * 0.5)


@pytest.mark.parametrize("heard", [True, False])
def test_a_peer_that_takes_nothing_is_waited_for_while_it_is_heard(thread: LoopThread, heard: bool) -> None:
    """Its line down is slow, and what it sends shows that it lives."""

    async def talk() -> None:
        one, two = await stream_pair()

        async def lives() -> None:
            for _ in range(4 if heard else 1):
                await two.write(b"x", 1)
                await asyncio.sleep(0.4)
            await two.read_into(memoryview(bytearray(1 << 20)), 1)

        reading = asyncio.ensure_future(one.read_into(memoryview(bytearray(4)), 10))
        living = asyncio.ensure_future(lives())
        if not heard:
            await asyncio.sleep(0.1)
            living.cancel()
        try:
            await one.write(bytes(1 << 20), 0.5)
        finally:
            reading.cancel()

    if heard:
        thread.call(talk(), 60)
    else:
        with pytest.raises(TimeoutError):
            thread.call(talk(), 60)
