"""Puts a trainer together; member.py chooses boundary and exchange, replica.py the inner loop and the outer method."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from peer import logs
from peer.config.schema import Config
from peer.data.open import corpus_of, read_ahead, validation
from peer.data.prefetch import await_next, begin_reading
from peer.device.accelerator import cpu_threads, pick_device
from peer.errors import UserError
from peer.hub.beside import PUSH_FOLDER, Pusher
from peer.logs import fields
from peer.p2p import identity
from peer.process import Signals
from peer.replica import model_source, pretrained_tokenizer
from peer.replica.sharded.ranks import Ranks
from peer.swarm.connect import connect
from peer.telemetry.run_log import EVALS, ROUNDS
from peer.telemetry.trackers import TENSORBOARD
from peer.training import replica
from peer.training.checkpoint import Checkpoints, hold_model
from peer.training.member import Membership
from peer.training.pausing.requests import watching
from peer.training.resources import member_node, open_resources
from peer.training.run_folder import set_aside
from peer.training.saving import Saver
from peer.training.state import PeerState
from peer.training.trainer import Trainer
from peer.training.validation import Validation

log = logs.get_logger("assemble")

CHECKPOINTS = "checkpoints"  # in the peer's folder


@contextmanager
def assembled(config: Config, signals: Signals, ranks: Ranks | None = None) -> Iterator[Trainer]:
    """A trainer that has joined the swarm, on all ranks of ``ranks``. At the end it leaves and closes everything."""
    own = config.peer
    with ExitStack() as stack:
        resources = stack.enter_context(open_resources(config.run, own, pick_device(own.device), signals.stop))
        logs.setup(resources.folder.name, resources.folder.path / "peer.log")
        if not own.checkpoint.resume:
            _begin_anew(resources.folder.path)
        if ranks is None:
            stack.enter_context(watching(resources.folder.path, own.hours, resources.context.pause))
        elif own.hours is not None:
            raise UserError("peer.hours: a peer of several ranks cannot pause; leave it out")
        with resources.timer("join"):
            pusher = None
            shutil.rmtree(resources.folder.path / PUSH_FOLDER, ignore_errors=True)  # of a push that a power cut ended
            if own.push is not None:
                pusher = Pusher(own.push, resources.folder.path, signals.stop, hold_model)
                stack.callback(pusher.close)
                pusher.say_rights()
            node = member_node(resources)
            stack.callback(node.stop)
            signals.emergency = node.kill
            connect(node, config.run)  # before gigabytes are loaded
            config = model_source.pinned(config)
            run = config.run
            resources = replace(resources, run=run)
            pretrained_tokenizer.warn(run)
            text = corpus_of(run)
            torch.set_num_threads(cpu_threads(own.threads))
            stream = identity.stream_of(resources.peer_id) if own.stream is None else own.stream
            device, context = resources.device, resources.context
            state = replica.replica(config, text.train, stream=stream, device=device, context=context, ranks=ranks)
            state.stream = read_ahead(run, state.stream, device, lambda: context.called_away or bool(node.failure))
            stack.callback(state.stream.close)
            checkpoints = Checkpoints(resources.folder.path / CHECKPOINTS, own.checkpoint.keep)
            checkpoints.require_space(state.checkpoint_bytes, 0 if pusher is None else state.push_bytes)
            resources.metrics["checkpoint_bytes"].set(state.checkpoint_bytes)
            resources.metrics["disk_free_bytes"].set_function(checkpoints.free_bytes)
            tokens_per_step = run.batch_size * run.data.sequence_length
            member = Membership(resources, node, state, total=run.steps, tokens_per_step=lambda: tokens_per_step)
            stack.callback(member.close)
            member.join(lambda: _resume(config, state, checkpoints), lambda: _await_data(config, state))
        chance = math.log(run.data.tokenizer.vocabulary)
        others = {name: validation(run, tokens) for name, tokens in text.others.items()}
        losses = Validation(state, resources.timer, chance, validation(run, text.validation), others)
        saver = Saver(checkpoints, state, member.reporter, resources.timer, pusher)
        yield Trainer(config, member, state, saver, losses)


def _begin_anew(folder: Path) -> None:
    """Keep what an earlier run has left in this peer's folder, elsewhere."""
    aside = set_aside(folder, (CHECKPOINTS, ROUNDS, EVALS, TENSORBOARD))
    if aside is not None:
        log.info("begins anew: the earlier run is in %s", aside)


def _resume(config: Config, state: PeerState, checkpoints: Checkpoints) -> None:
    """Restore this peer's newest checkpoint, if it has one, and begin to look for its place in the data."""
    saved = checkpoints.newest(state.refusal) if config.peer.checkpoint.resume else None
    if saved is not None:
        state.restore(saved)
        log.info("resumed: %s", fields(checkpoint=saved.path, step=state.inner.step, of=config.run.steps))
    _reads(config, state)


def _reads(config: Config, state: PeerState) -> bool:
    """Begin to read; returns whether the first batch is there. A run that is done needs none."""
    return state.inner.step >= config.run.steps or begin_reading(state.stream)


def _await_data(config: Config, state: PeerState) -> bool:
    """Wait for the first batch; returns whether it was not there yet."""
    if _reads(config, state):
        return False
    log.info("waits for its first batch")
    await_next(state.stream)
    return True
