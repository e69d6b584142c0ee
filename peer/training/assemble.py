"""From a configuration to a running trainer. The only place that picks its classes; tests replace parts here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from peer import logs
from peer.config.schema import Config
from peer.data import corpus
from peer.data.corpus import Corpus
from peer.data.open import evaluated, read_ahead
from peer.logs import fields
from peer.p2p import identity
from peer.process import LoopContext, Signals
from peer.replica import model_source, pretrained_tokenizer
from peer.replica.device import pick_device
from peer.replica.sharded.ranks import Ranks
from peer.training import replica
from peer.training.checkpoint import Checkpoints
from peer.training.loop import Parts, Training
from peer.training.member import Membership, Resources, grounded
from peer.training.overlapped_trainer import OverlappedTrainer
from peer.training.state import PeerState
from peer.training.trainer import Trainer

log = logs.get_logger("assemble")


@contextmanager
def assembled(config: Config, signals: Signals, ranks: Ranks | None = None) -> Iterator[Training]:
    """A trainer that is in the swarm, on all ranks of ``ranks``; leaves it and closes everything, whatever happens."""
    config = model_source.pinned(config)
    run, own = config.run, config.peer
    with ExitStack() as stack:
        ground = stack.enter_context(grounded(run, own, pick_device(own.device), signals.stop))
        logs.setup(ground.home.name, ground.home.folder / "peer.log")
        pretrained_tokenizer.warn(run)
        text = corpus.load(run.data, run.evaluation.sets)
        state = stack.enter_context(_replica(config, text, ground, ranks))
        checkpoints = Checkpoints(ground.home.folder / "checkpoints", own.checkpoint.keep)
        checkpoints.require_space(state.checkpoint_bytes)
        ground.metrics["checkpoint_bytes"].set(state.checkpoint_bytes)
        ground.metrics["disk_free_bytes"].set_function(checkpoints.free_bytes)
        member = Membership(ground, state, lambda: run.batch_size * run.data.sequence_length)
        stack.callback(member.close)
        signals.emergency = member.node.kill
        member.join(lambda: _resume(config, state, checkpoints))
        yield _trainer(config, state, checkpoints, member, text)


@contextmanager
def _replica(config: Config, text: Corpus, ground: Resources, ranks: Ranks | None) -> Iterator[PeerState]:
    """What trains; its data stream is closed at the end."""
    own = config.peer
    if own.threads:
        torch.set_num_threads(own.threads)
    stream = identity.stream_of(ground.peer_id) if own.stream is None else own.stream
    signs = LoopContext(ground.progress, ground.stop)
    state = replica.replica(config, text.train, stream=stream, device=ground.device, signs=signs, ranks=ranks)
    state.stream = read_ahead(config.run, state.stream, ground.device)
    try:
        yield state
    finally:
        state.stream.close()


def _resume(config: Config, state: PeerState, checkpoints: Checkpoints) -> None:
    """Take over this peer's newest checkpoint, if it has one."""
    saved = checkpoints.newest(state.refusal) if config.peer.checkpoint.resume else None
    if saved is not None:
        state.restore(saved)
        log.info("resumed: %s", fields(checkpoint=saved.path, step=state.inner.step))


def _trainer(config: Config, state: PeerState, checkpoints: Checkpoints, member: Membership, text: Corpus) -> Training:
    ground, sets = member.ground, evaluated(config.run, text)
    clock = ground.phase, ground.progress, ground.stop
    parts = Parts(state, member.presence, checkpoints, member.reporter, *clock, *sets)
    if member.overlaps:
        return OverlappedTrainer(config, parts, member.beside)
    return Trainer(config, parts, member.crossing())
