"""From a configuration to a running trainer. The only place that picks classes; tests replace parts here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from peer import build, corpus, logs, model_source, own_tokenizer, place, trackers
from peer.checkpoint import Checkpoints
from peer.config import Config, Exchange
from peer.config_digest import canonical, digest
from peer.corpus import Corpus
from peer.errors import UserError
from peer.exchange.average import GroupAverage
from peer.exchange.group import GroupExchange
from peer.exchange.guard import Guard
from peer.exchange.mesh import PROTOCOL as REDUCE_PROTOCOL
from peer.exchange.mesh import Lobby
from peer.exchange.pair import PairExchange
from peer.exchange.rolling import RollingExchange
from peer.exchange.wire import Identity, layout_digest
from peer.inner import synchronize
from peer.logs import fields
from peer.metrics import Metrics, PhaseClock
from peer.outer.decoupled import Decoupled
from peer.outer.method import OuterMethod
from peer.outer.noloco import NoLoCo
from peer.overlapped import OverlappedTrainer
from peer.progress import Progress
from peer.report import Reporter
from peer.rounds import Grouping
from peer.signals import Signals
from peer.standing import Standing
from peer.state import PeerState
from peer.swarm import identity
from peer.swarm.authority import Authority, invited
from peer.swarm.meeting import Party
from peer.swarm.node import OPEN_TIMEOUT, Node, NodeSettings
from peer.swarm.presence import Presence, Vitals
from peer.trainer import Trainer
from peer.training import Parts, Training

log = logs.get_logger("assemble")

STALE_ROUNDS = 2  # a resumed peer that is as little behind keeps its own weights: a state costs what two swaps cost


@contextmanager
def assembled(config: Config, signals: Signals) -> Iterator[Training]:
    """A trainer that is in the swarm; leaves it and closes everything at the end, whatever happens."""
    config = model_source.pinned(config)
    run, own = config.run, config.peer
    with ExitStack() as stack:
        home = place.claim(run.dir, own.name)
        stack.callback(home.release)
        logs.setup(home.name, home.folder / "peer.log")
        key, authority = _identity(config, home.folder)
        peer_id = identity.load_or_create(key)
        metrics = Metrics(method=run.outer.name, run=run.name, config=digest(run))
        metrics_address, close_metrics = metrics.serve(own.metrics.host, own.metrics.port)
        stack.callback(close_metrics)
        device = build.pick_device(own.device)
        phase = PhaseClock(metrics, partial(synchronize, device))

        progress = Progress()
        own_tokenizer.warn(run)
        text = corpus.load(run.data, run.evaluation.sets)
        state = stack.enter_context(_replica(config, text, device, peer_id, build.Signs(progress, signals.stop)))
        checkpoints = Checkpoints(home.folder / "checkpoints", own.checkpoint.keep)
        checkpoints.require_space(state.checkpoint_bytes)
        standing = Standing()
        tracked = trackers.start(own.trackers, home.folder, run=run.name, peer=home.name, peer_id=peer_id)
        reporter = Reporter(home.folder, metrics, standing, tracked)
        _gauges(metrics, state.checkpoint_bytes, checkpoints, device)
        stack.callback(reporter.close)

        node = Node(_node_settings(config, key), authority)
        me = Party(home.name, run.name, digest(run), canonical(run))
        layout = layout_digest(state.outer.slow.layout())
        presence = Presence(
            node,
            me,
            layout,
            grouping=state.outer.grouping,
            equal_replicas=state.outer.equal_replicas,
            settings=run.rendezvous,
            progress=progress,
            stop=signals.stop,
            vitals=lambda: Vitals(
                state.inner.step,
                state.counters.round,
                progress.rate(run.batch_size * run.data.sequence_length),
                standing.report(phase.totals),
            ),
            lineage=lambda: state.counters.lineage,
            metrics_address=own.metrics.announce or metrics_address,
        )
        stack.callback(presence.leave)
        signals.emergency = node.kill
        with phase("join"):
            node.start()
            _join(config, state, presence, checkpoints, reporter)
        what = fields(config=me.config, method=run.outer.name, parameters=state.outer.slow.numel, device=device)
        where = fields(address=node.addresses[0], metrics=metrics_address, step=state.inner.step)
        log.info("ready: %s %s", what, where)
        sets = build.evaluated(run, text)
        parts = Parts(state, presence, checkpoints, reporter, phase, progress, signals.stop, *sets)
        yield _trainer(config, parts, node, Identity(run.name, me.config, layout, state.outer.slow.numel))


def _join(config: Config, state: PeerState, presence: Presence, checkpoints: Checkpoints, reporter: Reporter) -> None:
    """Go on from the newest state there is, one's own or a member's, and be found."""
    together = config.peer.start_with > 1
    presence.require_alone()
    _resume(config, state, checkpoints)
    _catch_up(config, state, presence)
    reporter.rewind(state.counters.round, state.inner.step)
    presence.enter(state.snapshot, state.counters.round, waits=together)
    if together:
        presence.await_others(config.peer.start_with, config.peer.start_patience)
        _catch_up(config, state, presence)  # all have come back, each with its own checkpoint: who is furthest?


def _gauges(metrics: Metrics, size: int, checkpoints: Checkpoints, device: torch.device) -> None:
    """What is looked up when somebody asks."""
    metrics["checkpoint_bytes"].set(size)
    metrics["disk_free_bytes"].set_function(checkpoints.free_bytes)
    if device.type == "cuda":
        metrics["device_memory_bytes"].set_function(lambda: torch.cuda.max_memory_allocated(device))


def _identity(config: Config, folder: Path) -> tuple[Path, Authority | None]:
    """The file with this peer's key, and in an invited swarm what its invitation says."""
    run, own = config.run, config.peer
    if run.owner is None:
        return own.identity or folder / "identity.key", None
    if own.invitation is None:
        raise UserError("run.admission is invite: set peer.invitation to the file that the swarm's owner gave you")
    key = folder / "invited.key"
    return key, invited(own.invitation, key, run.owner)


def _node_settings(config: Config, key: Path) -> NodeSettings:
    network = config.peer.network
    return NodeSettings(
        identity=key,
        host=network.host,
        port=network.port,
        announce=network.announce,
        initial_peers=config.peer.initial_peers,
        upnp=network.upnp,
        reach=network.reach,
        start_timeout=network.start_timeout,
        join_timeout=network.join_timeout,
    )


@contextmanager
def _replica(
    config: Config, text: Corpus, device: torch.device, peer_id: str, signs: build.Signs
) -> Iterator[PeerState]:
    """What trains; its data stream is closed at the end."""
    own = config.peer
    if own.threads:
        torch.set_num_threads(own.threads)
    stream = identity.stream_of(peer_id) if own.stream is None else own.stream
    state = build.replica(config, text.train, stream=stream, device=device, signs=signs)
    state.stream = build.read_ahead(config.run, state.stream, device)
    try:
        yield state
    finally:
        state.stream.close()


def _trainer(config: Config, parts: Parts, node: Node, same: Identity) -> Training:
    outer, settings = parts.state.outer, config.run.exchange
    if outer.grouping is Grouping.EVERYONE:
        return Trainer(config, parts, _of_everyone(outer, node, same, settings))
    codec, guard = build.codec(settings.codec, same.numel), Guard()
    if settings.overlap and isinstance(outer, NoLoCo):
        return OverlappedTrainer(config, parts, RollingExchange(node, same, codec, settings, guard), outer)
    return Trainer(config, parts, PairExchange(node, same, codec, settings, guard))


def _of_everyone(outer: OuterMethod, node: Node, same: Identity, settings: Exchange) -> GroupAverage:
    lobby = Lobby()
    node.call(node.serve(REDUCE_PROTOCOL, lobby.enter), OPEN_TIMEOUT)
    if isinstance(outer, Decoupled):
        return GroupExchange(node, lobby, replace(same, numel=outer.sends), outer.coefficients, settings)
    return GroupExchange(node, lobby, same, same.numel, settings)


def _resume(config: Config, state: PeerState, checkpoints: Checkpoints) -> None:
    """Take over this peer's newest checkpoint, if it has one."""
    saved = checkpoints.newest(state.refusal) if config.peer.checkpoint.resume else None
    if saved is not None:
        state.restore(saved)
        log.info("resumed: %s", fields(checkpoint=saved.path, step=state.inner.step))


def _catch_up(config: Config, state: PeerState, presence: Presence) -> None:
    """Become as a member that is further, if there is one: a newcomer, or who resumes from before its last merges."""
    own_way = 0 if state.outer.equal_replicas or not state.inner.step else STALE_ROUNDS
    above = state.counters.round + own_way
    room = [torch.empty_like(vector) for vector in state.vectors()]
    taken = presence.join(room, config.peer.network.join_timeout, above=above)
    if taken is not None and taken.round > above:
        (state.catch_up if state.inner.step else state.adopt)(taken)
