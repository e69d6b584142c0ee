"""From a configuration to a running trainer. The only place that picks classes; tests replace parts here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from peer import corpus, data, logs, model, place
from peer.checkpoint import Checkpoints
from peer.config import Config, NoLoCo, canonical, digest
from peer.errors import UserError
from peer.exchange.pair import PairExchange
from peer.exchange.wire import Identity, layout_digest
from peer.inner import InnerLoop, synchronize
from peer.logs import fields
from peer.metrics import Metrics, PhaseClock
from peer.outer.local import Local
from peer.outer.method import OuterMethod
from peer.outer.noloco import NoLoCo as NoLoCoMethod
from peer.outer.slow_weights import SlowWeights
from peer.progress import Progress, Stop
from peer.report import Reporter
from peer.signals import Signals
from peer.state import PeerState
from peer.swarm import identity
from peer.swarm.meeting import Party
from peer.swarm.node import Node, NodeSettings
from peer.swarm.presence import Presence, Vitals
from peer.trainer import Parts, Trainer

log = logs.get_logger("assemble")

STALE_ROUNDS = 10  # a resumed peer that is less behind keeps its own weights: the next swaps bring them together


@contextmanager
def assembled(config: Config, signals: Signals) -> Iterator[Trainer]:
    """A trainer that is in the swarm; leaves it and closes everything at the end, whatever happens."""
    run, own = config.run, config.peer
    with ExitStack() as stack:
        home = place.claim(run.dir, own.name)
        stack.callback(home.release)
        logs.setup(home.name, home.folder / "peer.log")
        key = own.identity or home.folder / "identity.key"
        peer_id = identity.load_or_create(key)
        metrics = Metrics(method=run.outer.name, run=run.name, config=digest(run))
        metrics_address, close_metrics = metrics.serve(own.metrics.host, own.metrics.port)
        stack.callback(close_metrics)
        device = pick_device(own.device)
        phase = PhaseClock(metrics, partial(synchronize, device))

        progress = Progress()
        state, validation = _training(config, device, peer_id, progress, signals.stop)
        checkpoints = Checkpoints(home.folder / "checkpoints", own.checkpoint.keep)
        checkpoints.require_space(state.checkpoint_bytes)
        reporter = Reporter(home.folder, metrics)
        stack.callback(reporter.close)

        node = Node(_node_settings(config, key))
        me = Party(home.name, run.name, digest(run), canonical(run))
        slow = state.outer.slow
        layout = layout_digest(slow.layout())
        tokens_a_step = run.batch_size * run.data.sequence_length
        presence = Presence(
            node,
            me,
            layout,
            group_size=state.outer.group_size,
            settings=run.rendezvous,
            progress=progress,
            stop=signals.stop,
            vitals=lambda: Vitals(state.inner.step, state.counters.round, progress.rate(tokens_a_step)),
            metrics_address=metrics_address,
        )
        stack.callback(presence.leave)
        signals.emergency = node.kill
        with phase("join"):
            node.start()
            _begin(config, state, checkpoints, presence)
            reporter.rewind(state.counters.round, state.inner.step)
            presence.enter(state.snapshot, state.counters.round)
        what = fields(config=me.config, method=run.outer.name, parameters=slow.numel, device=device)
        where = fields(address=node.addresses[0], metrics=metrics_address, step=state.inner.step)
        log.info("ready: %s %s", what, where)
        exchange = PairExchange(node, Identity(run.name, me.config, layout, slow.numel), run.exchange)
        yield Trainer(
            config,
            Parts(state, exchange, presence, checkpoints, reporter, phase, progress, signals.stop, validation),
        )


def pick_device(wish: str) -> torch.device:
    """``auto``: the accelerator when there is one. Raises :class:`UserError` when one is asked for and is not there."""
    available = torch.cuda.is_available()
    if wish == "cuda" and not available:
        raise UserError("peer.device: cuda is not available here; look at nvidia-smi and the torch build, or use cpu")
    return torch.device("cuda" if available and wish != "cpu" else "cpu")


def wants_bf16(precision: str, device: torch.device) -> bool:
    """bf16 autocast by itself only where the device computes in it."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


def _node_settings(config: Config, key: Path) -> NodeSettings:
    network = config.peer.network
    return NodeSettings(
        identity=key,
        host=network.host,
        port=network.port,
        announce=network.announce,
        initial_peers=config.peer.initial_peers,
        upnp=network.upnp,
        start_timeout=network.start_timeout,
        join_timeout=network.join_timeout,
    )


def _training(
    config: Config, device: torch.device, peer_id: str, progress: Progress, stop: Stop
) -> tuple[PeerState, list[torch.Tensor]]:
    run, own = config.run, config.peer
    if own.threads:
        torch.set_num_threads(own.threads)
    text = corpus.load(run.data)
    length = run.data.sequence_length
    stream = data.TokenStream(
        text.train,
        batch_size=run.batch_size,
        sequence_length=length,
        seed=run.seed,
        stream=identity.stream_of(peer_id) if own.stream is None else own.stream,
    )
    validation = data.validation_batches(
        text.validation, batches=run.evaluation.batches, batch_size=run.batch_size, sequence_length=length
    )
    network = model.build(run.model, sequence_length=length, seed=run.seed).to(device)
    inner = InnerLoop(
        network,
        run.inner,
        total_steps=run.steps,
        device=device,
        autocast=wants_bf16(own.precision, device),
        micro_batch=own.micro_batch,
        progress=progress,
        stop=stop,
    )
    slow = SlowWeights(network.named_parameters())
    outer: OuterMethod = NoLoCoMethod(slow, run.outer) if isinstance(run.outer, NoLoCo) else Local(slow)
    return PeerState(inner, outer, stream, digest(run)), validation


def _begin(config: Config, state: PeerState, checkpoints: Checkpoints, presence: Presence) -> None:
    """Where to start from: this peer's checkpoint, a member that is further, or the seed's fresh weights."""
    if config.peer.checkpoint.resume:
        saved = checkpoints.newest(state.refusal)
        if saved is not None:
            state.restore(saved)
            log.info("resumed: %s", fields(checkpoint=saved.path, step=state.inner.step))
    room = [torch.empty_like(vector) for vector in state.vectors()]
    taken = presence.join(room, config.peer.network.join_timeout)
    if taken is not None and taken.round > state.counters.round + (STALE_ROUNDS if state.inner.step else 0):
        state.adopt(taken)
