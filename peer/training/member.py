"""A peer's side to the swarm, around whatever trains: reporter, node and presence; it joins, exchanges and leaves.

Put together here for both the trainer (assemble.py) and a program's own loop (api/loop.py). Before it: resources.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer.config.digest import canonical, digest
from peer.config.schema import MemberConfig
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
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import OPEN_TIMEOUT, NodeSettings
from peer.rounds.types import Grouping
from peer.swarm.presence import Presence, Vitals
from peer.telemetry import trackers
from peer.telemetry.report import Reporter
from peer.training.blocking import Blocking
from peer.training.boundary import Boundary
from peer.training.catch_up import catch_up, join_late
from peer.training.outer_state import OuterState
from peer.training.overlapped import Overlapped
from peer.training.phase import PhaseLength
from peer.training.resources import Resources
from peer.training.validation import Validation

log = get_logger("membership")


class Membership:
    """``close`` leaves the swarm, whatever has happened.

    ``total``: inner steps of the run, infinite when nobody knows; ``tokens``: how many an inner step trains on.
    """

    def __init__(self, resources: Resources, state: OuterState, *, total: float, tokens: Callable[[], float]) -> None:
        run, own, slow = resources.run, resources.own, state.outer.slow
        self.resources, self.state, self._tokens = resources, state, tokens
        self.phase_length = PhaseLength(run, total, state, resources.context.progress)
        self._stack = ExitStack()
        self.reporter = self._reporter()
        self._stack.callback(self.reporter.close)
        layout = layout_digest(slow.layout())
        me = MemberIdentity(resources.folder.name, run.name, digest(run), canonical(run), layout)
        self.node = MemberNode(_node_settings(own, resources.key), resources.authority, me)
        self._same = Identity(slow.numel)
        self.presence = Presence(
            self.node,
            grouping=state.outer.grouping,
            equal_replicas=state.outer.equal_replicas,
            settings=run.rendezvous,
            loop=resources.context,
            counters=state.counters,
            vitals=self._vitals,
            metrics_address=own.metrics.announce or resources.metrics_address,
        )
        self._stack.callback(self.presence.leave)

    def _reporter(self) -> Reporter:
        run, own, folder = self.resources.run, self.resources.own, self.resources.folder
        tracked = trackers.start(
            own.trackers, folder.path, run=run.name, peer=folder.name, peer_id=self.resources.peer_id
        )
        return Reporter(folder.path, self.resources.metrics, tracked)

    def _vitals(self) -> Vitals:
        """What this peer's record says of now."""
        return Vitals(
            self.state.inner.step,
            self.resources.context.progress.rate(self._tokens()),
            self.reporter.status(self.resources.phase.totals),
        )

    def join(self, resume: Callable[[], None] = lambda: None, *, newcomer_above: int = 0) -> None:
        """Go on from the newest state there is, one's own (``resume`` takes it over) or a member's, and be found.

        ``newcomer_above``: one that has trained nothing takes the weights of a member that is beyond this round.
        """
        own, presence, counters = self.resources.own, self.presence, self.state.counters
        reached = self.reporter.reached()
        together = own.start_with > 1
        with self.resources.phase("join"):
            self.node.start()
            presence.require_alone()
            resume()
            self._catch_up(newcomer_above, reached)
            self.reporter.rewind(counters.round, self.state.inner.step)
            presence.enter(self.state.snapshot, counters.round, waits=together)
            if together:
                presence.await_others(own.start_with, own.start_patience)
                self._catch_up(reached=reached)  # all have come back, each with its own checkpoint: one is furthest
        what = fields(
            config=self.node.member.config,
            method=self.resources.run.outer.name,
            parameters=self._same.numel,
            device=self.resources.device,
        )
        where = fields(
            address=self.node.addresses[0], metrics=self.resources.metrics_address, step=self.state.inner.step
        )
        log.info("ready: %s %s", what, where)

    def rejoin(self) -> None:
        """The state was replaced by an older or newer one: go on from it, or from a member's that is further."""
        with self.resources.phase("join"):
            self._catch_up()
            self.reporter.rewind(self.state.counters.round, self.state.inner.step)

    def join_late(self, validation: Validation | None = None) -> bool:
        """At a boundary: go on from others' weights if this peer's cannot be averaged with them; returns whether it
        does. With ``validation`` only if these are good enough.
        """
        replaced = join_late(self.state, self.presence, self.resources.phase, validation)
        if replaced:
            self.reporter.replaced()
        return replaced

    def _catch_up(self, newcomer_above: int = 0, reached: int = 0) -> None:
        timeout = self.resources.own.network.join_timeout
        catch_up(self.state, self.presence, timeout, newcomer_above=newcomer_above, reached=reached)

    def boundary(self) -> Boundary:
        """What ends this peer's rounds; made once, after :meth:`join`."""
        settings, method = self.resources.run.exchange, self.state.outer
        if not settings.overlap:
            return Blocking(self.state, self.presence, self.reporter, self.resources, self._exchange())
        assert isinstance(method, NoLoCo), "checked with the configuration"
        coder = codec(settings.codec, self._same.numel)
        exchange = OverlappedPairExchange(self.node, self._same, coder, settings, Guard())
        self._stack.callback(exchange.close)
        return Overlapped(
            self.state,
            self.presence,
            self.reporter,
            self.resources,
            exchange=exchange,
            method=method,
            phase_length=self.phase_length,
        )

    def _exchange(self) -> Exchange[Any]:
        outer, settings, same, node = self.state.outer, self.resources.run.exchange, self._same, self.node
        if outer.grouping is not Grouping.EVERYONE:
            return PairExchange(node, same, codec(settings.codec, same.numel), settings, Guard())
        incoming = IncomingStreams()
        node.call(node.serve_members(REDUCE_PROTOCOL, incoming.accept), OPEN_TIMEOUT)
        if isinstance(outer, Decoupled):
            return AllGatherExchange(node, incoming, replace(same, numel=outer.sends), outer.coefficients, settings)
        return AllReduceExchange(node, incoming, same, same.numel, settings)

    def close(self) -> None:
        """Withdraw the record, say goodbye, close the node and the files."""
        self._stack.close()


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
