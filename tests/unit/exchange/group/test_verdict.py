"""A member that does not hear how a round has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.streams import GroupStreams, IncomingStreams
from peer.exchange.group.wire import GroupFailure, GroupVerdict, Hello
from peer.exchange.pair.wire import Header
from peer.p2p.stream import StreamLost
from peer.rounds.contribution import Vector
from peer.rounds.types import Outcome
from tests.unit.exchange.group.harness import many
from tests.unit.virtual import run, stream_pair


def test_who_does_not_hear_the_verdict_keeps_the_digest_of_what_others_may_have_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hear = AllReduceExchange._hear

    async def deaf(exchange: Any, kind: Any, *rest: Any) -> Any:
        said = await hear(exchange, kind, *rest)
        if kind is GroupVerdict and exchange._network._me.name == "c":
            raise StreamLost("it is lost")
        return said

    monkeypatch.setattr(AllReduceExchange, "_hear", deaf)
    tensors = [torch.full((100,), float(number)) for number in range(3)]
    with many(3, 100) as group:
        *rest, last = group.average([*map(Vector, tensors)])
        assert last is not None and rest[0] is not None
        assert (last.outcome, last.digest, last.unheard) == (Outcome.TIMEOUT, "", rest[0].digest)
        assert torch.equal(last.mean, tensors[2])
        assert [(it.outcome, it.unheard) for it in rest if it] == [(Outcome.MERGED, "")] * 2


def test_who_hears_that_nobody_uses_the_result_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    combine = AllReduceExchange._combine

    async def fails(exchange: Any, own: Vector, streams: GroupStreams) -> None:
        await combine(exchange, own, streams)
        if streams.assembly.me == 1:
            raise GroupFailure(2, Outcome.TIMEOUT, "it does not answer")

    monkeypatch.setattr(AllReduceExchange, "_combine", fails)
    with many(3, 100) as group:
        results = group.average([Vector(torch.ones(100))] * 3)
        assert [(it.outcome, it.digest, it.unheard) for it in results if it] == [(Outcome.TIMEOUT, "", "")] * 3


def test_a_member_that_calls_twice_holds_one_stream() -> None:
    """The first stream was forgotten and stayed open: 384 of them let nobody in for the rest of the process."""

    async def scene() -> list[bool]:
        incoming, streams = IncomingStreams(), []
        for _ in range(3):
            ours, theirs = await stream_pair()
            theirs.remote = "QmA"
            await ours.send(Hello(token="t", index=1, header=Header(payload_bytes=0, round=3)), 5)
            await incoming.accept(theirs)
            streams.append(theirs)
        closed = [it.closed for it in streams]
        incoming.clear()
        return [*closed, streams[-1].closed]

    assert run(scene()) == [True, True, False, True]
