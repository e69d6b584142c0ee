"""hivemind's client of the p2p daemon, mended: a late answer ends no reader, and a request that ends is forgotten."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto.p2pd_pb2 import CallUnaryRequest, CallUnaryResponse, Cancel, PersistentConnectionResponse

from peer.p2p.dht import join
from peer.p2p.dht.join import PINGS
from peer.p2p.dht.mended import calls_have_ended, mend_calls

REMOTE = PeerID.from_base58("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")


class Daemon:
    """What reads its messages is hivemind's own code."""

    def __init__(self, *, mended: bool) -> None:
        self.control = ControlClient(cast(Any, None), _initialized_with_create=True)
        self.p2p: Any = SimpleNamespace(_client=SimpleNamespace(control=self.control))
        if mended:
            mend_calls(self.p2p)
        self._stream = asyncio.StreamReader()
        self.control._read_task = asyncio.create_task(self.control._read_from_persistent_conn(self._stream))

    async def says(self, call_id: UUID, **what: Any) -> None:
        data = PersistentConnectionResponse(callId=call_id.bytes, **what).SerializeToString()
        assert len(data) < 128  # a length of one byte
        self._stream.feed_data(bytes([len(data)]) + data)
        for _ in range(8):
            await asyncio.sleep(0)

    def calls(self) -> tuple[UUID, asyncio.Future[bytes]]:
        call_id, answer = uuid4(), asyncio.get_running_loop().create_future()
        self.control._pending_calls[call_id] = answer
        return call_id, answer


@pytest.mark.real_time
@pytest.mark.parametrize("mended", [True, False])
async def test_an_answer_in_the_moment_in_which_its_caller_gives_up_ends_no_other_call(mended: bool) -> None:
    daemon = Daemon(mended=mended)
    late, given_up = daemon.calls()
    given_up.cancel()
    await daemon.says(late, callUnaryResponse=CallUnaryResponse(response=b"late"))
    assert calls_have_ended(daemon.p2p) is not mended, "hivemind is mended: shorten dht/mended.py"
    if not mended:
        assert isinstance(cast(Any, daemon.control._read_task).exception(), asyncio.InvalidStateError)
        return
    later, answer = daemon.calls()
    await daemon.says(later, callUnaryResponse=CallUnaryResponse(response=b"well"))
    assert answer.result() == b"well"


@pytest.mark.real_time
@pytest.mark.parametrize("mended", [True, False])
async def test_a_request_that_is_cancelled_is_forgotten(mended: bool) -> None:
    async def slow(data: bytes, remote: PeerID) -> bytes:
        await asyncio.sleep(60)
        return data

    daemon = Daemon(mended=mended)
    daemon.control.unary_handlers["slow"] = slow
    for _ in range(10):
        call_id = uuid4()
        request = CallUnaryRequest(peer=REMOTE.to_bytes(), proto="slow", data=b"")
        await daemon.says(call_id, requestHandling=request)
        assert call_id in daemon.control._handler_tasks
        await daemon.says(call_id, cancel=Cancel())
    assert len(daemon.control._handler_tasks) == (0 if mended else 10), "hivemind is mended: shorten dht/mended.py"
    await daemon.says(uuid4(), requestHandling=CallUnaryRequest(peer=REMOTE.to_bytes(), proto="none", data=b""))
    assert not mended or not daemon.control._handler_tasks


@pytest.mark.parametrize(("late", "cut"), [(PINGS - 1, False), (PINGS, True)])
async def test_an_initial_peer_is_hung_up_on_only_when_it_answers_no_ping_of_several(
    late: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ping waits behind a swap on the same slow line. One late answer cut the line, and the swap with it."""
    pings: list[PeerID] = []

    async def call_ping(peer_id: PeerID) -> str | None:
        pings.append(peer_id)
        return "answer" if len(pings) > late else None

    async def dialled(*_: Any) -> None:
        return None

    cuts, answered = list[str](), list[PeerID]()

    async def silent(address: str) -> None:
        cuts.append(address)

    monkeypatch.setattr(join, "dial", dialled)
    blacklist = SimpleNamespace(register_success=lambda peer_id: answered.append(peer_id))
    dht: Any = SimpleNamespace(protocol=SimpleNamespace(call_ping=call_ping), blacklist=blacklist)
    with suppress(TimeoutError):
        async with asyncio.timeout(join.REDIAL_SECONDS * 1.3):
            await join.keep_in_touch(cast(Any, None), dht, [f"/ip4/10.0.0.7/tcp/1/p2p/{REMOTE}"], silent)
    assert bool(cuts) is cut and len(pings) >= PINGS
    assert set(answered) <= {REMOTE} and len(answered) == len(pings) - late  # then it is an anchor again
