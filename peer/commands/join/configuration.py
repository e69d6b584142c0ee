"""The configuration of a peer that joins: ``run`` from the swarm, everything that is this machine's from its user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from peer.commands.join.kept import kept
from peer.commands.join.micro_batch import fitting
from peer.commands.join.words import downloads, outlined
from peer.config import load
from peer.config.digest import canonical, difference
from peer.config.fields import Section, expanded
from peer.config.received import ReceivedRun, received, require_hub_tokenizer
from peer.config.schema import Config, PeerConfig, RunConfig
from peer.errors import RunError, UserError
from peer.p2p.addresses import is_loopback
from peer.replica import model_source
from peer.swarm.configuration import OfferedRun, offered

WANTED = {
    "run.data.train": "its text is in files of each machine: --set 'run.data.train=[PATTERN]'",
    "run.data.folder": "each machine has a copy of C4: --set run.data.folder=FOLDER",
    "run.data.path": "it trains on a data set of the Hugging Face hub or of a folder: --set run.data.path=NAME",
    "run.model.source": "its model comes from files: --set run.model.source=NAME on the Hugging Face hub, or FOLDER",
}


@dataclass(frozen=True)
class JoinOptions:
    """What the command line says. ``digest``: of the configuration to take; none: that of most members."""

    addresses: Sequence[str]
    files: Sequence[Path]
    overrides: Sequence[str]
    run: str | None
    digest: str | None
    invitation: Path | None
    ranks: int = 1


class _OwnHalf(Section):
    """What is known before the swarm is asked."""

    run: dict[str, Any] = Field(default_factory=dict)
    peer: PeerConfig = PeerConfig()


def joining(options: JoinOptions, say: Callable[[str], None]) -> Config:
    """Ask the swarm, say in a few lines what it trains, and return the configuration of this peer.

    Raises :class:`UserError` and :class:`peer.errors.RunError`, each with one line that says what to do.
    """
    values = list(load.overridden(options.overrides))
    if options.addresses:
        values.append(("peer.initial_peers", list(options.addresses)))
    if options.invitation:
        values.append(("peer.invitation", str(options.invitation)))
    own = load.resolve(_OwnHalf, options.files, values)
    addresses = own.peer.initial_peers
    if not addresses:
        raise UserError("join: give an ADDRESS that noloco-bootstrap or a peer printed (or NOLOCO_INITIAL_PEERS)")
    run_dir = expanded(str(own.run.get("dir", RunConfig.model_fields["dir"].default)))
    joined = kept(run_dir, own.peer.name, addresses, options.run, options.digest)
    offer = offered(own.peer, options.run, options.digest, joined=joined) or joined
    if offer is None:
        what = f"trains {options.run}" if options.run else "trains"
        raise RunError(  # somebody may later: a service tries again
            f"nobody {what} there yet; the first peer needs a configuration: noloco-peer train --config FILE "
            f"--initial-peers {addresses[0]}"
        )
    run = received(offer.text)
    if "host" not in own.peer.network.model_fields_set and all(map(is_loopback, addresses)):
        values.append(("peer.network.host", "127.0.0.1"))
    config = merged(offer, run, own.run, options.files, values)
    for line in (*outlined(config, offer), *downloads(config)):
        say(line)
    config = model_source.pinned(config)
    micro_batch = fitting(config, options.ranks)
    if micro_batch != config.peer.micro_batch:
        say(f"this machine's memory: {micro_batch} of the {config.run.batch_size} sequences of a step at once")
    return config.model_copy(update={"peer": config.peer.model_copy(update={"micro_batch": micro_batch})})


def merged(
    offer: OfferedRun, run: ReceivedRun, own: dict[str, Any], files: Sequence[Path], values: Sequence[tuple[str, Any]]
) -> Config:
    """The swarm's ``run`` with this machine's local settings. ``own``: those that the user has given under ``run``.

    Raises :class:`UserError` when one is missing, and when one changes what is equal for all.
    """
    if run.tree["name"] != offer.name:
        raise UserError(f"the members of {offer.name} have sent the configuration of another run")
    missing = [f"{key}: {WANTED[key]}" for key in run.needed if not _given(own, *key.split(".")[1:])]
    if missing:
        raise UserError(f"{offer.name} needs of this machine {'; and '.join(missing)}")
    if not _given(own, "data", "tokenizer", "path"):
        require_hub_tokenizer(run.tree)
    config = load.resolve(Config, files, values, base={"run": run.tree})
    if canonical(config.run) != offer.text:
        changed = difference(canonical(config.run), offer.text)
        raise UserError(f"join: {changed}: it is equal for all of the swarm, leave it out; train --config begins a run")
    return config


def _given(tree: Any, *keys: str) -> bool:
    for key in keys:
        if not isinstance(tree, dict) or tree.get(key) is None:
            return False
        tree = tree[key]
    return True
