"""A peer as a member of the swarm: reporter, node, presence and boundary. It joins, exchanges and leaves.

Used by the trainer (assemble.py) and by a program's own loop (api/loop.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import xxhash

from peer.config.digest import canonical, digest
from peer.exchange.group.all_gather import AllGatherExchange
from peer.exchange.group.all_reduce import AllReduceExchange
from peer.exchange.group.streams import REDUCE_PROTOCOL, IncomingStreams
from peer.exchange.guard import Guard
from peer.exchange.modulo import codec_named
from peer.exchange.pair.blocking import PairExchange
from peer.exchange.pair.overlapped import OverlappedPairExchange
from peer.logs import fields, get_logger
from peer.outer.decoupled import Decoupled
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.node import OPEN_TIMEOUT
from peer.rounds.contribution import Exchange
from peer.rounds.types import Grouping
from peer.swarm.presence import Presence
from peer.telemetry import trackers
from peer.telemetry.report import Reporter
from peer.training.boundaries.blocking import Blocking
from peer.training.boundaries.boundary import Boundary, PhaseLength
from peer.training.boundaries.overlapped import Overlapped
from peer.training.catch_up import catch_up, join_late
from peer.training.outer_state import OuterState
from peer.training.resources import Resources
from peer.training.validation import Validation

log = get_logger("membership")


class Membership:
    """One member, on a ``node`` that has joined. ``total``: inner steps of the run, infinite when unknown."""

    def __init__(
        self,
        resources: Resources,
        node: MemberNode,
        state: OuterState,
        *,
        total: float,
        tokens_per_step: Callable[[], float],
    ) -> None:
        run, own, slow, folder = resources.run, resources.own, state.outer.slow, resources.folder
        self.resources, self.state = resources, state
        self.phase_length = PhaseLength(run, total, state, resources.context.progress)
        self._stack = ExitStack()
        tracked = trackers.start(own.trackers, folder.path, run=run.name, peer=folder.name, peer_id=resources.peer_id)
        self.reporter = Reporter(folder.path, resources.metrics, tracked, resources.context.pause)
        self._stack.callback(tracked.close)
        layout = xxhash.xxh3_128_hexdigest(slow.layout().encode())
        self.node = node
        node.member = MemberIdentity(folder.name, run.name, digest(run), canonical(run), layout)
        resources.metrics.set_build(method=run.outer.name, run=run.name, config=node.member.config)
        self.presence = Presence(
            self.node,
            run,
            grouping=state.outer.grouping,
            equal_replicas=state.outer.equal_replicas,
            training=resources.context,
            counters=state.counters,
            tokens_per_step=tokens_per_step,
            step=lambda: state.inner.step,
            report=lambda: self.reporter.status(resources.timer.totals, self.presence.size),
            metrics_address=own.metrics.announce or resources.metrics_address,
        )
        self._stack.callback(self.presence.leave)

    def join(self, resume: Callable[[], None] | None = None, await_data: Callable[[], bool] = lambda: False) -> None:
        """Enter the swarm with the newest state: this peer's own, which ``resume`` restores, or a member's.

        ``None``: a program's own loop, which has a seed of its own and may restore a state later (:meth:`rejoin`). Its
        rows remain until then, or until its first round repeats one.
        ``await_data``: until this peer has its first batch, which may take hours; returns whether that took time. A
        state that was taken before would be as old. Peers that begin together see one another first: otherwise who
        has its batch would begin alone when its patience ends.
        """
        own, presence, counters = self.resources.own, self.presence, self.state.counters
        reached, timeout = self.reporter.reached, own.network.join_timeout
        together = own.start_with > 1
        with self.resources.timer("join"):
            if resume is not None:
                resume()
            if not together:
                await_data()
            catch_up(self.state, presence, timeout, reached=reached, same_seed=resume is not None)
            if resume is not None:
                self.reporter.rewind(counters.round, self.state.inner.step)
            presence.enter(self.state.snapshot, counters.round, waits=together)
            self.resources.metrics["swarm_members"].set(presence.size)
            if together:
                latest = presence.start_barrier.await_others(own.start_with, own.start_patience)
                if await_data():
                    latest = None  # who was faster has trained meanwhile
                # all have resumed from their own checkpoints: one of these is the newest
                catch_up(self.state, presence, timeout, reached=reached, latest=latest)
        ready = fields(
            config=self.node.member.config,
            method=self.resources.run.outer.name,
            parameters=self.state.outer.slow.numel,
            device=self.resources.device,
            address=self.node.addresses[0],
            metrics=self.resources.metrics_address,
            step=self.state.inner.step,
        )
        log.info("ready: %s", ready)

    def rejoin(self, *, restored: bool = True) -> None:
        """Continue from this state, which the program has replaced (``restored``) or a pause has left as it was, or
        from a newer one of a member.
        """
        with self.resources.timer("join"):
            catch_up(self.state, self.presence, self.resources.own.network.join_timeout, restored=restored)
            self.reporter.rewind(self.state.counters.round, self.state.inner.step)

    def join_late(self, validation: Validation | None = None) -> bool:
        """:func:`catch_up.join_late`, with its report."""
        replaced = join_late(self.state, self.presence, self.resources.timer, validation)
        if replaced:
            self.resources.metrics["weights_taken_total"].inc()
        return replaced

    def make_boundary(self, validation: Validation | None = None) -> Boundary:
        """The end of this peer's rounds; call it once, after :meth:`join`. ``validation``: checks what others gave."""
        settings, numel = self.resources.run.exchange, self.state.outer.slow.numel
        parts = self.state, self.presence, self.reporter, self.resources, self.phase_length
        if not settings.overlap:
            return Blocking(*parts, self._exchange(), validation=validation)
        codec = codec_named(settings.codec, numel)
        exchange = OverlappedPairExchange(network=self.node, numel=numel, codec=codec, settings=settings, guard=Guard())
        self._stack.callback(exchange.close)
        return Overlapped(*parts, exchange, validation=validation)

    def _exchange(self) -> Exchange:
        outer, settings, node = self.state.outer, self.resources.run.exchange, self.node
        numel, context = outer.slow.numel, self.resources.context

        def away() -> bool:
            return context.away

        if outer.grouping is not Grouping.EVERYONE:
            codec = codec_named(settings.codec, numel)
            return PairExchange(network=node, numel=numel, codec=codec, settings=settings, guard=Guard(), away=away)
        incoming = IncomingStreams()
        node.call(node.serve_members(REDUCE_PROTOCOL, incoming.accept), OPEN_TIMEOUT)
        if not isinstance(outer, Decoupled):
            return AllReduceExchange(
                network=node, incoming=incoming, numel=numel, settings=settings, away=away, kept=self.state.kept
            )
        return AllGatherExchange(
            network=node, incoming=incoming, numel=outer.sends, result=outer.coefficients, settings=settings, away=away
        )

    def stay(self) -> None:
        """After the run's last round: until who asks for these weights has them. Unequal replicas keep their own."""
        if self.state.outer.equal_replicas:
            self.presence.stay()

    def close(self) -> None:
        """Leave the swarm: withdraw the record, close the node and the files."""
        self._stack.close()
