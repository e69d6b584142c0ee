"""A two-way byte stream to one peer, with a deadline on every await and a cap on everything read.

A stream that ends is not a stream that is complete (the p2p daemon resets both directions when one
ends), so every protocol ends with acknowledgements, never with an end of stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from peer import clock
from peer.errors import one_line
from peer.p2p.bandwidth import UNLIMITED, Bandwidth

if TYPE_CHECKING:
    from peer.p2p.bulk.offer import BulkPort
    from peer.p2p.bulk.transfer import BulkTransfer

MESSAGE_CAP = 64 * 1024  # bytes; the largest message carries a run's configuration
MESSAGE_TIMEOUT = 5.0  # seconds for one message
CLOSE_SECONDS = 1.0  # for the other side to close after our last message, which nobody answers
WRITE_CHUNK = 128 * 1024  # bytes for one deadline: on a slow line a whole part takes longer
UNSENT_SECONDS = 25.0  # in which a stream that was closed sends the rest
BAD_MESSAGE_CAP = 200  # characters that are said of a bad message: some of them are its sender's own
_LENGTH_BYTES = 4


class Message(BaseModel):
    """Base of all messages between peers; strict in both directions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Refusal(Message):
    """The side that was called says no: to a greeting that does not fit (greeting.py), or to what is asked of it.
    ``run``: our configuration if it differs. All versions can read it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    kind: Literal["refusal"] = "refusal"
    reason: Annotated[str, Field(max_length=200, pattern=r"^[ -~]*$")]  # a part of one line
    run: str | None = None


class StreamLost(Exception):
    """The other side has ended the stream or died."""


class Refused(StreamLost):
    """The other side has answered with a :class:`Refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.run = refusal.run


class BadMessage(Exception):
    """The other side sent something this protocol does not know."""


M = TypeVar("M", bound=Message)


@dataclass(eq=False)
class Stream:
    """One stream; ``remote`` is the authenticated libp2p id (base58) of the other side.

    Raises :class:`StreamLost`, :class:`BadMessage` or ``TimeoutError`` from every method that waits.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    remote: str
    initiator: bool
    origin: str = ""  # the multiaddr at the other end of the connection
    sent: int = 0  # bytes
    received: int = 0  # bytes
    heard: float = -math.inf  # when something was received last
    transfers: bool = False  # parts go over it, with deadlines of their own
    hang_up: Callable[[], None] = lambda: None  # closes the whole connection
    gate: Callable[[Stream], Awaitable[None]] | None = None  # checks the other side before the first read
    bandwidth: Bandwidth = UNLIMITED  # for parts
    bulk_port: BulkPort | None = None  # where direct connections for parts are possible
    bulk: BulkTransfer | None = None  # that is offered or in use

    @property
    def direct(self) -> BulkTransfer | None:
        """The direct connections that both sides use for parts; ``None`` when parts go over this stream."""
        return self.bulk if self.bulk is not None and self.bulk.ready else None

    @property
    def all_sent(self) -> int:
        """Bytes, with those of parts on direct connections."""
        return self.sent + (self.bulk.sent if self.bulk is not None else 0)

    @property
    def all_received(self) -> int:
        """As :attr:`all_sent`."""
        return self.received + (self.bulk.received if self.bulk is not None else 0)

    @property
    def silence(self) -> float:
        """Seconds since something was received, of parts on direct connections too; 0 within :meth:`transferring`."""
        heard = max(self.heard, self.bulk.heard if self.bulk is not None else -math.inf)
        return 0.0 if self.transfers else clock.monotonic() - heard

    @contextlib.contextmanager
    def transferring(self) -> Iterator[None]:
        """Within the context parts go over it: only their own deadlines say that its connection is dead."""
        self.transfers = True
        try:
            yield
        finally:
            self.transfers = False

    async def send(self, message: Message, timeout: float) -> None:
        """Send one message; ``timeout`` in seconds."""
        body = message.model_dump_json().encode()
        if len(body) > MESSAGE_CAP:
            raise BadMessage(f"message of {len(body)} bytes is above the cap of {MESSAGE_CAP}")
        await self.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body, timeout)

    async def receive(self, kind: type[M] | TypeAdapter[M], timeout: float) -> M:
        """Receive one message of a kind, or of several (an adapter); its length is checked before it is read.

        Raises :class:`Refused` when the side that was called says no instead.
        """
        await self._through_gate()
        async with asyncio.timeout(timeout):
            length = int.from_bytes(await self._exactly(_LENGTH_BYTES), "big")
            if length > MESSAGE_CAP:
                raise BadMessage(f"announced message of {length} bytes is above the cap of {MESSAGE_CAP}")
            body = await self._exactly(length)
        try:
            return kind.validate_json(body) if isinstance(kind, TypeAdapter) else kind.model_validate_json(body)
        except ValidationError as error:
            if self.initiator:
                with contextlib.suppress(ValidationError):
                    raise Refused(Refusal.model_validate_json(body)) from None
            first = error.errors(include_url=False, include_input=False)[0]
            raise BadMessage(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:BAD_MESSAGE_CAP]) from None

    async def write(self, data: bytes, timeout: float) -> None:
        """Send raw bytes; returns when the transport wants more. ``timeout`` bounds each wait for it, in seconds.

        The wait begins anew when something was received meanwhile: who reads slowly is not dead.
        """
        view = memoryview(data)
        for start in range(0, len(data), WRITE_CHUNK):
            piece = view[start : start + WRITE_CHUNK]
            with _lost():
                self.writer.write(piece)
                while not await self._drained(timeout):
                    pass
            self.sent += len(piece)

    async def _drained(self, timeout: float) -> bool:
        """Does the transport want more? Raises ``TimeoutError`` when for that long nothing has moved either way."""
        before = self.received
        try:
            async with asyncio.timeout(timeout):
                await self.writer.drain()
        except TimeoutError:
            if self.received == before:
                raise
            return False
        return True

    async def read_into(self, out: memoryview, timeout: float) -> None:
        """Fill ``out`` (bytes) from the stream; ``timeout`` bounds each wait for more bytes, in seconds."""
        await self._through_gate()
        filled = 0
        while filled < len(out):
            with _lost():
                async with asyncio.timeout(timeout):
                    data = await self.reader.read(len(out) - filled)
            if not data:
                raise StreamLost(f"the stream ended {len(out) - filled} bytes early")
            out[filled : filled + len(data)] = data
            filled += len(data)
            self._count(len(data))

    async def send_last(self, message: Message, timeout: float) -> None:
        """Send one message and close when the other side has; ``timeout`` bounds each of the two."""
        with contextlib.closing(self):
            await self.send(message, timeout)
            await self.until_closed(timeout)

    @property
    def ended(self) -> bool:
        """The other side has closed, and all that it sent was received."""
        return self.reader.at_eof()

    @property
    def closed(self) -> bool:
        """This side has closed it."""
        return self.writer.is_closing()

    @property
    def holds_file(self) -> bool:
        """It is an open file: this side has not closed it, or the other side has not taken all that was written."""
        return not self.closed or _unsent(self.writer) > 0

    async def until_closed(self, timeout: float) -> None:
        """Wait for the other side to close, so that our last bytes are not cut off by our own closing."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(timeout):
                while await self.reader.read(4096):
                    pass

    def close(self) -> None:
        """Close both directions. Closing twice is fine."""
        if self.bulk is not None:
            self.bulk.close()
        with contextlib.suppress(OSError, RuntimeError):
            _shut(self.writer)
            self.writer.close()
            if _unsent(self.writer):
                asyncio.get_running_loop().call_later(UNSENT_SECONDS, self._give_up)

    def _give_up(self) -> None:
        """The other side may never take what is left, and the file would stay open."""
        if _unsent(self.writer):
            self.writer.transport.abort()
            _shut(self.writer)

    async def _through_gate(self) -> None:
        if self.gate is not None:
            check, self.gate = self.gate, None
            await check(self)

    async def _exactly(self, count: int) -> bytes:
        with _lost():
            data = await self.reader.readexactly(count)
        self._count(count)
        return data

    def _count(self, size: int) -> None:
        self.received += size
        self.heard = clock.monotonic()


Open = Callable[[str, str, Sequence[str]], Awaitable[Stream]]  # to a peer, by a protocol, at addresses


def _unsent(writer: asyncio.StreamWriter) -> int:
    """Bytes that wait until the other side takes more."""
    return writer.transport.get_write_buffer_size() if isinstance(writer, asyncio.StreamWriter) else 0


def _shut(writer: asyncio.StreamWriter) -> None:
    """Shut the socket down, of which a forked process (a data loader) may have a copy: its close alone ends nothing.

    Not while it has something to send: that goes out first.
    """
    if isinstance(writer, asyncio.StreamWriter) and not _unsent(writer):
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Turns asyncio's errors of a broken stream into :class:`StreamLost`; ``TimeoutError`` stays."""
    try:
        yield
    except asyncio.IncompleteReadError:
        raise StreamLost("the stream ended") from None
    except TimeoutError:
        raise
    except OSError as error:
        raise StreamLost(one_line(error)) from None
