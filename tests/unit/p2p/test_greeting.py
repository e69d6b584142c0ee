"""Only members of the same run talk to each other, and the others are told why not."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import peer
from peer import __version__, clock
from peer.config.digest import canonical
from peer.config.schema import InnerConfig, RunConfig
from peer.p2p.event_loop import LoopThread
from peer.p2p.greeting import WIRE_VERSION, Greeting, MemberIdentity, refusal_of
from peer.p2p.stream import MESSAGE_TIMEOUT, BadMessage, Message, Refusal, Refused, Stream, StreamLost
from tests.unit.virtual import run, stream_pair, took

OTHER_RUN = RunConfig(inner=InnerConfig(learning_rate=0.5))
ME = MemberIdentity("me", "demo", "c", canonical(RunConfig()), "layout")


class Hello(Message):
    words: str


async def conversation(member: MemberIdentity, said: Message | bytes, patience: float = 5.0) -> tuple[Any, str]:
    """What a caller that begins with ``said`` hears from ``member``, which says hello to its own; and how that ends."""

    async def serve(stream: Stream) -> None:
        try:
            await member.admit(stream)
            await stream.send(Hello(words="come in"), 1)
        finally:
            stream.close()

    one, two = await stream_pair()
    serving = asyncio.ensure_future(serve(two))
    heard: Any = None
    try:
        await (one.write(said, 1) if isinstance(said, bytes) else one.send(said, 1))
        heard = await one.receive(Hello, patience)
    except StreamLost as error:
        heard = error
    one.close()
    (ended,) = await asyncio.gather(serving, return_exceptions=True)
    return heard, f"{type(ended).__name__}: {ended}"


def said_to(member: MemberIdentity, said: Message | bytes) -> tuple[Any, str]:
    return run(conversation(member, said))


@pytest.mark.parametrize("play", [run, asyncio.run], ids=["memory", "sockets"])
def test_a_member_of_the_same_run_is_listened_to(play: Callable[..., tuple[Any, str]]) -> None:
    heard, _ = play(conversation(ME, replace(ME, name="you").greeting))
    assert heard == Hello(words="come in")


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"run": "x"}, "trains another run"), ({"config": "x"}, "another configuration"), ({"layout": "x"}, "layout")],
)
def test_another_swarms_member_is_refused_with_the_reason(change: dict[str, str], reason: str) -> None:
    heard, ended = said_to(ME, replace(ME, **change).greeting)
    assert isinstance(heard, Refused) and reason in str(heard)
    assert heard.run == (ME.canonical if "config" in change else None)
    assert ended.startswith("StreamLost: refused") and reason in ended


def test_who_is_refused_for_its_configuration_can_name_the_first_key(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("noloco").propagate = True
    you = MemberIdentity("you", "demo", "d", canonical(OTHER_RUN), "layout")
    heard, _ = said_to(ME, you.greeting)
    assert you.difference(heard) == "run.inner.learning_rate is 0.5 here and 0.001 there"
    for name in ("x", "x", "y"):  # once a peer
        you.warn_of(name, heard)
    assert caplog.text.count("trains another configuration: run.inner.learning_rate is 0.5 here and 0.001 there") == 2


def test_a_peer_of_another_wire_version_is_told_which_is_which(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever else a later version says in its greeting."""
    logging.getLogger("noloco").propagate = True

    class Later(Greeting):
        colour: str = "blue"

    later = Later(**{**ME.greeting.model_dump(), "wire": WIRE_VERSION + 1, "version": "9.9.9"})
    heard, _ = said_to(ME, later)
    assert isinstance(heard, Refused)
    ME.warn_of("cone", heard)
    (line,) = caplog.text.splitlines()
    assert line.endswith(
        f"peer cone refuses this peer: it runs noloco-peer {__version__} (wire version {WIRE_VERSION}), "
        f"this peer 9.9.9 (wire version {WIRE_VERSION + 1}): update the older one"
    )


def test_no_name_of_a_protocol_has_a_version() -> None:
    """A stream of another name did not open, so a peer of another version was told no reason."""
    files = Path(peer.__file__).parent.rglob("*.py")
    names = [name for path in files for name in re.findall(r'_PROTOCOL = "(.*)"', path.read_text(encoding="utf-8"))]
    assert len({*names}) == len(names) >= 9
    assert all(re.fullmatch("noloco/[a-z]+", name) for name in names)


async def test_a_refusal_of_a_later_version_is_understood() -> None:
    one, two = await stream_pair()
    body = b'{"kind":"refusal","reason":"it trains another run","colour":"blue"}'
    await two.write(len(body).to_bytes(4, "big") + body, 1)
    with pytest.raises(Refused, match="another run"):
        await one.receive(Hello, 1)


@pytest.mark.parametrize("reason", ["two\nlines", "x" * 201])
def test_a_refusal_is_one_line(reason: str) -> None:
    with pytest.raises(ValueError, match="reason"):
        Refusal(reason=reason)


async def test_only_who_was_called_refuses() -> None:
    one, two = await stream_pair()
    await one.send(Refusal(reason="it trains another run"), 1)
    with pytest.raises(BadMessage):
        await two.receive(Hello, 1)


@pytest.mark.parametrize("said", [Hello(words="I am new here"), (2**31).to_bytes(4, "big")])
def test_who_does_not_greet_is_not_listened_to(said: Message | bytes) -> None:
    heard, ended = said_to(ME, said)
    assert isinstance(heard, StreamLost) and not isinstance(heard, Refused)
    assert ended.startswith("BadMessage")


def test_a_caller_that_says_nothing_is_given_up(thread: LoopThread) -> None:
    began = clock.monotonic()
    heard, ended = thread.call(conversation(ME, b"", patience=60.0), 60)
    assert isinstance(heard, StreamLost) and ended.startswith("TimeoutError")
    assert clock.monotonic() - began == took(MESSAGE_TIMEOUT)


async def test_a_caller_that_is_cancelled_while_it_greets_leaves_no_stream_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, _ = await stream_pair()

    class Opener:
        async def open(self, *_: object) -> Stream:
            return stream

    async def blocked(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(stream, "send", blocked)
    opener: Any = Opener()
    asking = asyncio.ensure_future(refusal_of(opener, ME.greeting, "QmA", "noloco/meet", ()))
    await asyncio.sleep(1)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() and stream.closed
