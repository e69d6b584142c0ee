"""The resources of a peer on its machine: folder, identity, metrics and clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from peer.config.schema import MemberConfig, SwarmRunConfig
from peer.device.copies import synchronize
from peer.device.memory import peak_bytes
from peer.errors import UserError
from peer.p2p import identity
from peer.p2p.admission.dht_rules import Authority, invited
from peer.p2p.admission.invitation import INVITED_KEY
from peer.p2p.greeting import MemberIdentity, MemberNode
from peer.p2p.reachability.cloud import announced
from peer.p2p.settings import NodeSettings
from peer.process import LoopContext, Stop
from peer.telemetry.metrics import ActivityTimer, Metrics
from peer.training import run_folder
from peer.training.run_folder import RunFolder


@dataclass(frozen=True)
class Resources:
    """``key``: the file with the peer's private key."""

    run: SwarmRunConfig
    own: MemberConfig
    device: torch.device
    folder: RunFolder
    key: Path
    authority: Authority | None
    peer_id: str
    metrics: Metrics
    metrics_address: str
    timer: ActivityTimer
    context: LoopContext


@contextmanager
def open_resources(run: SwarmRunConfig, own: MemberConfig, device: torch.device, stop: Stop) -> Iterator[Resources]:
    """Claim the peer's folder and serve its metrics until the end of the context."""
    with ExitStack() as stack:
        folder = run_folder.claim(run.dir, own.name)
        stack.callback(folder.release)
        key, authority = _identity(run, own, folder.path)
        peer_id = identity.load_or_create(key)
        metrics = Metrics()
        address, close = metrics.serve(own.metrics.host, own.metrics.port)
        stack.callback(close)
        if device.type != "cpu":
            metrics["device_memory_bytes"].set_function(partial(peak_bytes, device))
        yield Resources(
            run=run,
            own=own,
            device=device,
            folder=folder,
            key=key,
            authority=authority,
            peer_id=peer_id,
            metrics=metrics,
            metrics_address=address,
            timer=ActivityTimer(metrics, partial(synchronize, device)),
            context=LoopContext(stop=stop),
        )


def member_node(resources: Resources) -> MemberNode:
    """A node that is not started. It has no configuration to greet with: its digest needs the model's files."""
    run, own = resources.run, resources.own
    nobody_yet = MemberIdentity(resources.folder.name, run.name, config="", canonical="", layout="")
    network = own.network
    if network.reach != "relay":
        announce = announced(network.host, network.port, network.announce)
        network = network.model_copy(update={"announce": announce})
    return MemberNode(NodeSettings.of(network, resources.key, own.initial_peers), resources.authority, nobody_yet)


def _identity(run: SwarmRunConfig, own: MemberConfig, folder: Path) -> tuple[Path, Authority | None]:
    """The file with this peer's key, and the authority of a swarm with invitations."""
    if run.owner is None:
        return own.identity or folder / "identity.key", None
    if own.invitation is None:
        raise UserError("run.admission is invite: set peer.invitation to the file that the swarm's owner gave you")
    key = folder / INVITED_KEY
    return key, invited(own.invitation, key, run.owner)
