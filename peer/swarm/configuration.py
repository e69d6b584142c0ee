"""What a swarm trains, for a node that is no member: the digest that most members' records name, and its configuration.

Any member gives the configuration: it refuses the greeting of a :func:`peer.p2p.greeting.newcomer` with it. So does a
bootstrap node that has read it, for a newcomer that cannot reach the members. Only a text with the wanted digest is
used, so one that lies changes nothing. In an open swarm anybody can write records,
also many: who has learned the digest from a person gives it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from peer import clock
from peer.config.digest import LARGEST_TEXT, digest_of
from peer.config.schema import MemberConfig
from peer.errors import RunError, UserError
from peer.p2p.addresses import owner_of, place_of
from peer.p2p.deadline import together
from peer.p2p.greeting import guest_node, guest_settings, newcomer, refusal_of
from peer.p2p.node import OPEN_TIMEOUT, Node
from peer.p2p.stream import MESSAGE_TIMEOUT, Refused
from peer.swarm.directory.reader import Onlooker, Reader
from peer.swarm.directory.records import MemberRecord
from peer.swarm.state_transfer.donor import STATE_PROTOCOL

OFFERS_ASKED = 3
OFFER_TIMEOUT = OPEN_TIMEOUT + 2 * MESSAGE_TIMEOUT  # seconds for one member
GUEST_TIMEOUT = 60.0  # seconds to join
RUNS_SECONDS = 15.0  # until the first record must be found
RUNS_PAUSE = 0.5  # seconds


class NoMajority(UserError):
    """The members of a run have several configurations, and none is that of more than half of them."""


@dataclass(frozen=True)
class OfferedRun:
    """``text`` is canonical and has ``digest``; no more was checked. ``agreeing`` of ``members`` records name it."""

    name: str
    digest: str
    text: str
    agreeing: int
    members: int


def most_common(records: Sequence[MemberRecord]) -> str | None:
    """The digest that more than half of the records name; ``None`` when none is."""
    ((digest, count),) = Counter(record.config for record in records).most_common(1) or [("", 0)]
    return digest if 2 * count > len(records) else None


async def ask(node: Node, run: str, digest: str, peer_id: str, addresses: Sequence[str]) -> str | Refused | None:
    """The configuration (canonical text) that this peer has or has read, if it has the ``digest``; how it refuses to
    tell it; or ``None`` for no answer or a wrong one. Ends within ``OFFER_TIMEOUT``.
    """
    said = await refusal_of(node, newcomer(run), peer_id, STATE_PROTOCOL, addresses)
    if said is None or said.run is None:
        return said
    fits = len(said.run) <= LARGEST_TEXT and digest_of(said.run) == digest
    return said.run if fits else None


def offered(
    own: MemberConfig, name: str | None = None, digest: str | None = None, joined: OfferedRun | None = None
) -> OfferedRun | None:
    """Ask the swarm at ``own.initial_peers``; ``None`` when nobody trains there.

    ``name`` of the run, if there may be several; ``digest``: the one to use, whatever most members have; ``joined``:
    what this machine has joined there before, with this name and digest, for where the swarm gives no single answer.
    Raises :class:`UserError` and :class:`RunError`, each with one line that says what to do, :class:`NoMajority` among
    them. From the main thread.
    """
    settings = guest_settings(own.initial_peers, own.network.join_timeout)
    with guest_node(settings, own.invitation) as (node, _):
        reached = node.connect()
        node.call(node.join(reached, client=True), GUEST_TIMEOUT)
        runs = {name: Reader(node, name).refresh_all()} if name else _runs(node)
        runs = {run: records for run, records in runs.items() if records}
        run = _chosen(runs, joined)
        return None if run is None else _from_swarm(node, run, runs[run], digest, reached, joined)


def _chosen(runs: Mapping[str, Sequence[MemberRecord]], joined: OfferedRun | None) -> str | None:
    """The run to ask for. Of several it is that of ``joined``, and ``None`` where nobody trains that one."""
    if len(runs) < 2:
        return next(iter(runs), None)
    if joined is not None:
        return joined.name if joined.name in runs else None
    counts = {run: len(records) for run, records in sorted(runs.items())}
    listed = ", ".join(f"{run} ({count} peer{'s' * (count != 1)})" for run, count in counts.items())
    raise UserError(f"several runs are trained there: {listed}; choose one with --run NAME, or run=NAME in a program")


def _runs(node: Node) -> dict[str, list[MemberRecord]]:
    """The live members of each run that is found; the names of runs may come late."""
    onlooker, until = Onlooker(node), clock.monotonic() + RUNS_SECONDS
    while True:
        found, now = onlooker.read(), clock.unix()
        runs = {run: [it.record for it in there.values() if it.is_live(now)] for run, there in found.items()}
        if any(runs.values()) or clock.monotonic() > until:
            return runs
        clock.sleep(RUNS_PAUSE)


def _from_swarm(
    node: Node,
    run: str,
    records: Sequence[MemberRecord],
    wanted: str | None,
    reached: Sequence[str] = (),
    joined: OfferedRun | None = None,
) -> OfferedRun:
    """From members, or from the nodes at the initial peers that were ``reached``."""
    digest = wanted or most_common(records)
    those = [record for record in records if record.config == digest]
    if not those and joined is not None and joined.name == run:  # no majority, or nobody has the wanted one
        return replace(joined, agreeing=sum(it.config == joined.digest for it in records), members=len(records))
    if digest is None:
        raise NoMajority(
            f"the members of {run} do not agree on a configuration: {_camps(records)}; ask one of them whom you trust, "
            "and choose with --digest"
        )
    if not those:
        raise UserError(f"no member of {run} has the configuration {digest}: {_camps(records)}")

    async def ask_some() -> list[str | Refused | None]:
        members = random.sample(those, min(OFFERS_ASKED, len(those)))
        peers = [*((it.peer_id, it.addresses) for it in members), *((owner_of(it), [place_of(it)]) for it in reached)]
        return await together(ask(node, run, digest, *peer) for peer in peers)

    answers = node.call(ask_some(), OFFER_TIMEOUT + OPEN_TIMEOUT)
    text = next((it for it in answers if isinstance(it, str)), None)
    if text is None:
        why = next((f": {it}" for it in answers if isinstance(it, Refused)), " within its time; try again")
        raise RunError(f"no member of {run} has sent the configuration {digest}{why}")
    return OfferedRun(run, digest, text, len(those), len(records))


def _camps(records: Sequence[MemberRecord]) -> str:
    """``1a2b (alice, bob), 3c4d (carol)``, the largest first."""
    camps: dict[str, list[str]] = defaultdict(list)
    for record in records:
        camps[record.config].append(record.name)
    largest = sorted(camps.items(), key=lambda it: -len(it[1]))[:4]
    return ", ".join(f"{digest} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" for digest, names in largest)
