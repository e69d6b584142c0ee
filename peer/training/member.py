"""A peer's side to the swarm, whatever trains on the other side: who it is, its node, its place among the others.

    Ground       before there is anything to train: folder, identity, metrics, clock
    Membership   around what trains: reporter, node and presence; joins, exchanges, leaves

Put together here for both the trainer (assemble.py) and a user's own loop (own/loop.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peer.config.digest import canonical, digest
from peer.config.schema import MemberConfig, SwarmRunConfig
from peer.errors import UserError
from peer.exchange.average import Exchange
from peer.exchange.codecs import codec
from peer.exchange.group.all_gather import AllGatherExchange
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.streams import REDUCE_PROTOCOL, IncomingStreams
from peer.exchange.guard import Guard
from peer.exchange.pair.blocking import PairExchange
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.exchange.pair.wire import Identity, layout_digest
from peer.logs import fields, get_logger
from peer.outer.decoupled import Decoupled
from peer.outer.noloco import NoLoCo
from peer.p2p import identity
from peer.p2p.admission.dht_rules import Authority, invited
from peer.p2p.node import OPEN_TIMEOUT, Node, NodeSettings
from peer.process import Stop
from peer.replica.device import synchronize
from peer.rounds.contribution import Averaged
from peer.rounds.progress import Progress
from peer.rounds.types import Grouping
from peer.swarm.party import Party
from peer.swarm.presence import Presence, Vitals
from peer.telemetry import trackers
from peer.telemetry.metrics import Metrics, PhaseClock
from peer.telemetry.peer_status import PeerStatus
from peer.telemetry.report import Counted, Reporter
from peer.training import run_folder
from peer.training.blocking import Crossing
from peer.training.catch_up import catch_up, join_late
from peer.training.outer_state import OuterState
from peer.training.overlapped import Beside
from peer.training.run_folder import RunFolder

log = get_logger("membership")


@dataclass(frozen=True)
class Resources:
    """What a peer stands on before it has anything to train."""

    run: SwarmRunConfig
    own: MemberConfig
    device: torch.device
    home: RunFolder
    key: Path
    authority: Authority | None
    peer_id: str
    metrics: Metrics
    metrics_address: str
    phase: PhaseClock
    progress: Progress
    stop: Stop


@contextmanager
def grounded(run: SwarmRunConfig, own: MemberConfig, device: torch.device, stop: Stop) -> Iterator[Resources]:
    """Claims the peer's folder and serves its metrics until the end."""
    with ExitStack() as stack:
        home = run_folder.claim(run.dir, own.name)
        stack.callback(home.release)
        key, authority = _identity(run, own, home.folder)
        peer_id = identity.load_or_create(key)
        metrics = Metrics(method=run.outer.name, run=run.name, config=digest(run))
        address, close = metrics.serve(own.metrics.host, own.metrics.port)
        stack.callback(close)
        if device.type == "cuda":
            metrics["device_memory_bytes"].set_function(lambda: torch.cuda.max_memory_allocated(device))
        phase = PhaseClock(metrics, partial(synchronize, device))
        yield Resources(run, own, device, home, key, authority, peer_id, metrics, address, phase, Progress(), stop)


class Membership:
    """``close`` leaves the swarm, whatever has happened. ``tokens``: how many an inner step trains on."""

    def __init__(self, ground: Resources, state: OuterState, tokens: Callable[[], float]) -> None:
        self.ground, self.state = ground, state
        run, own = ground.run, ground.own
        self._stack = ExitStack()
        standing = PeerStatus()
        tracked = trackers.start(
            own.trackers, ground.home.folder, run=run.name, peer=ground.home.name, peer_id=ground.peer_id
        )
        self.reporter = Reporter(ground.home.folder, ground.metrics, standing, tracked)
        self._stack.callback(self.reporter.close)
        self.node = Node(_node_settings(own, ground.key), ground.authority)
        me = Party(ground.home.name, run.name, digest(run), canonical(run))
        layout = layout_digest(state.outer.slow.layout())
        self._same = Identity(run.name, me.config, layout, state.outer.slow.numel)
        self.presence = Presence(
            self.node,
            me,
            layout,
            grouping=state.outer.grouping,
            equal_replicas=state.outer.equal_replicas,
            settings=run.rendezvous,
            progress=ground.progress,
            stop=ground.stop,
            vitals=lambda: Vitals(
                state.inner.step,
                state.counters.round,
                ground.progress.rate(tokens()),
                standing.report(ground.phase.totals),
            ),
            lineage=lambda: state.counters.lineage,
            metrics_address=own.metrics.announce or ground.metrics_address,
        )
        self._stack.callback(self.presence.leave)

    def join(self, resume: Callable[[], None] = lambda: None, *, newcomer_above: int = 0) -> None:
        """Go on from the newest state there is, one's own (``resume`` takes it over) or a member's, and be found.

        ``newcomer_above``: one that has trained nothing takes the weights of a member that is beyond this round.
        """
        own, presence, counters = self.ground.own, self.presence, self.state.counters
        reached = self.reporter.reached()
        together = own.start_with > 1
        with self.ground.phase("join"):
            self.node.start()
            presence.require_alone()
            resume()
            self._catch_up(newcomer_above, reached)
            self.reporter.rewind(counters.round, self.state.inner.step)
            presence.enter(self.state.snapshot, counters.round, waits=together)
            if together:
                presence.await_others(own.start_with, own.start_patience)
                self._catch_up(reached=reached)  # all have come back, each with its own checkpoint: who is furthest?
        what = fields(
            config=self._same.config,
            method=self.ground.run.outer.name,
            parameters=self._same.numel,
            device=self.ground.device,
        )
        where = fields(address=self.node.addresses[0], metrics=self.ground.metrics_address, step=self.state.inner.step)
        log.info("ready: %s %s", what, where)

    def rejoin(self) -> None:
        """The state was replaced by an older or newer one: go on from it, or from a member's that is further."""
        with self.ground.phase("join"):
            self._catch_up()
            self.reporter.rewind(self.state.counters.round, self.state.inner.step)

    def join_late(self) -> None:
        """At a boundary: go on from others' weights if this peer's cannot be averaged with them."""
        if join_late(self.state, self.presence, self.ground.phase):
            self.reporter.replaced()

    def _catch_up(self, newcomer_above: int = 0, reached: int = 0) -> None:
        timeout = self.ground.own.network.join_timeout
        catch_up(self.state, self.presence, timeout, newcomer_above=newcomer_above, reached=reached)

    def crossing(self) -> Crossing:
        """The boundaries of a peer that stands at them."""
        return Crossing(self.state, self.presence, self._exchange(), self.ground.phase, self.ground.stop)

    @property
    def overlaps(self) -> bool:
        """The swap runs beside the inner steps: :meth:`beside`, not :meth:`crossing`."""
        return self.ground.run.exchange.overlap

    def beside(self, report: Callable[[Counted, Averaged], None]) -> Beside:
        """The boundaries of one that does not."""
        outer, settings, ground = self.state.outer, self.ground.run.exchange, self.ground
        assert isinstance(outer, NoLoCo), "checked with the configuration"
        coder = codec(settings.codec, self._same.numel)
        exchange = OverlappedPairExchange(self.node, self._same, coder, settings, Guard())
        clock = ground.phase, ground.progress, ground.stop
        return Beside(self.state, self.presence, exchange, outer, clock, report)

    def _exchange(self) -> Exchange[Any]:
        outer, settings, same, node = self.state.outer, self.ground.run.exchange, self._same, self.node
        if outer.grouping is not Grouping.EVERYONE:
            return PairExchange(node, same, codec(settings.codec, same.numel), settings, Guard())
        incoming = IncomingStreams()
        node.call(node.serve(REDUCE_PROTOCOL, incoming.accept), OPEN_TIMEOUT)
        if isinstance(outer, Decoupled):
            return AllGatherExchange(node, incoming, replace(same, numel=outer.sends), outer.coefficients, settings)
        return AllReduceExchange(node, incoming, same, same.numel, settings)

    def close(self) -> None:
        """Withdraw the record, say goodbye, close the node and the files."""
        self._stack.close()


def _identity(run: SwarmRunConfig, own: MemberConfig, folder: Path) -> tuple[Path, Authority | None]:
    """The file with this peer's key, and in an invited swarm what its invitation says."""
    if run.owner is None:
        return own.identity or folder / "identity.key", None
    if own.invitation is None:
        raise UserError("run.admission is invite: set peer.invitation to the file that the swarm's owner gave you")
    key = folder / "invited.key"
    return key, invited(own.invitation, key, run.owner)


def _node_settings(own: MemberConfig, key: Path) -> NodeSettings:
    network = own.network
    return NodeSettings(
        identity=key,
        host=network.host,
        port=network.port,
        announce=network.announce,
        initial_peers=own.initial_peers,
        upnp=network.upnp,
        reach=network.reach,
        start_timeout=network.start_timeout,
        join_timeout=network.join_timeout,
    )
