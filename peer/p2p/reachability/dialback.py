"""Can others dial me? Every node answers that by dialling back, over a new TCP connection (tls_probe.py).

    asker: Ask      answerer: Answer | Busy

A node dials only the address from which the asker's own connection comes, so nobody can make it dial third parties.
Budgets bound how often, each attempt has a deadline, and the dialled side receives nothing but the
beginning of a handshake. decide.py draws the conclusion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from peer import clock
from peer.logs import fields, get_logger
from peer.p2p.addresses import is_circuit, tcp_of
from peer.p2p.budgets import DIALBACKS, Spending
from peer.p2p.reachability.tls_probe import NotLibp2p, who_answers
from peer.p2p.stream import MESSAGE_TIMEOUT, Message, Open, Stream
from peer.rounds.backoff import Proven

log = get_logger("dialback")

DIALBACK_PROTOCOL = "noloco/dialback"
DIAL_TIMEOUT = 3.0  # seconds for one address
PLACES = 4  # addresses in one question
AT_ONCE = 8  # questions
LONGEST_BUSY = 60.0  # seconds that an asker may be told to wait

Text = Annotated[str, Field(max_length=128)]
Short = Annotated[str, Field(max_length=64, pattern=r"^[ -~]*$")]  # a part of one line
Result = Literal["reached", "refused", "timeout", "another", "not_yours"]


class Ask(Message):
    """Who are you, and can you dial these addresses of mine? (Multiaddrs without my id.)"""

    kind: Literal["ask"] = "ask"
    places: Annotated[list[Text], Field(max_length=PLACES)]


class Tried(Message):
    """``another``: another node answers there; ``not_yours``: not where your connection comes from, so not tried."""

    place: Text
    result: Result


def _ip_or_nothing(text: str) -> str:
    return str(ip_address(text)) if text else ""


class Answer(Message):
    """``observed``: the IP address from which the asker's connection comes, empty when it came through a relay."""

    kind: Literal["answer"] = "answer"
    now: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # unix seconds
    observed: Annotated[Short, AfterValidator(_ip_or_nothing)]
    tried: Annotated[list[Tried], Field(max_length=PLACES)]


class Busy(Message):
    """Asked too often; ask again after ``seconds``."""

    kind: Literal["busy"] = "busy"
    seconds: Annotated[float, Field(ge=0, le=LONGEST_BUSY, allow_inf_nan=False)]


ANSWER: TypeAdapter[Answer | Busy] = TypeAdapter(Annotated[Answer | Busy, Field(discriminator="kind")])
Dial = Callable[[str, int, float], Awaitable[str]]


class DialBack:
    """Serves :data:`DIALBACK_PROTOCOL`. ``dial``: :func:`who_answers`."""

    def __init__(self, dial: Dial = who_answers) -> None:
        self._dial = dial
        self._asked, self._room = Spending(DIALBACKS, Proven()), asyncio.Semaphore(AT_ONCE)

    async def answer(self, stream: Stream) -> None:
        """One stream."""
        asked = await stream.receive(Ask, MESSAGE_TIMEOUT)
        place = "" if is_circuit(stream.origin) else stream.origin
        observed = (tcp_of(place) or ("", 0))[0]
        seconds = self._asked.wait(observed or "through a relay")
        if seconds or self._room.locked():
            busy = Busy(seconds=min(seconds or DIAL_TIMEOUT, LONGEST_BUSY))
            await stream.send_last(busy, MESSAGE_TIMEOUT)
            return
        async with self._room:
            tried = await asyncio.gather(*(self._try(it, observed, stream.remote) for it in asked.places))
        await stream.send_last(Answer(now=clock.unix(), observed=observed, tried=tried), MESSAGE_TIMEOUT)

    async def _try(self, place: str, observed: str, asker: str) -> Tried:
        found = tcp_of(place)
        if found is None or found[0] != observed:
            log.debug("not dialled back: %s", fields(peer=asker[-6:], place=place, observed=observed))
            return Tried(place=place, result="not_yours")
        return Tried(place=place, result=await self._result(*found, asker))

    async def _result(self, host: str, port: int, asker: str) -> Result:
        try:
            return "reached" if await self._dial(host, port, DIAL_TIMEOUT) == asker else "another"
        except TimeoutError:
            return "timeout"
        except NotLibp2p:
            return "another"
        except OSError:
            return "refused"


@dataclass(frozen=True)
class Heard:
    """An answer; ``ahead``: seconds by which the answerer's clock is ahead of ours."""

    answer: Answer
    ahead: float


async def ask(open: Open, peer_id: str, addresses: Sequence[str], places: Sequence[str]) -> Heard | Busy:
    """One question. Raises :class:`StreamLost`, :class:`BadMessage` or ``TimeoutError``."""
    with closing(await open(peer_id, DIALBACK_PROTOCOL, addresses)) as stream:
        began = clock.unix()
        await stream.send(Ask(places=list(places[:PLACES])), MESSAGE_TIMEOUT)
        answer = await stream.receive(ANSWER, MESSAGE_TIMEOUT + DIAL_TIMEOUT)
        if isinstance(answer, Busy):
            return answer
        return Heard(answer, answer.now - (began + clock.unix()) / 2)
