"""The configurations that a peer has joined, in ``<run.dir>/joined/<peer name>/<run>.json``: for a restart when nobody
else trains, and when the swarm gives no single answer.

Each is a file for ``--config`` too, with the addresses by which the swarm was joined. It does not name the peer, since
another one may be given it. Files of earlier versions lie in ``joined`` itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path

from peer.config.digest import LARGEST_TEXT, canonical, digest_of
from peer.config.files import replacing
from peer.config.schema import Config
from peer.logs import get_logger
from peer.p2p.addresses import owner_of
from peer.swarm.configuration import OfferedRun
from peer.training.run_folder import next_name

log = get_logger("join")

JOINED = "joined"


def keep(config: Config, peer_name: str) -> None:
    """Write it, of a peer that trains: a start that is refused must not decide what a service joins next. An error of
    the disk is logged: the file serves a later restart only. ``peer_name``: of the folder that the peer has claimed.
    """
    path = config.run.dir / JOINED / peer_name / f"{config.run.name}.json"
    body = {"run": json.loads(canonical(config.run)), "peer": {"initial_peers": list(config.peer.initial_peers)}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:  # another peer of this machine may join at the same time
            new.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("a restart when nobody else trains will not know this run: %s: %s", path, error.strerror)


def kept(
    run_dir: Path, peer_name: str | None, initial_peers: Sequence[str], name: str | None, digest: str | None
) -> OfferedRun | None:
    """The one that this peer has joined last through one of the nodes ``initial_peers``, else any peer of ``run_dir``;
    ``name`` and ``digest``, if given, must fit. ``None`` where there is none.

    A peer without a name is taken for the one whose folder it would claim now, with that one's checkpoints.
    """
    nodes, folder = set(map(owner_of, initial_peers)) - {""}, run_dir / JOINED
    for paths in (folder.joinpath(peer_name or next_name(run_dir)).glob("*.json"), folder.rglob("*.json")):
        found = [
            (written, offer)
            for written, offer, addresses in _readable(paths)
            if nodes & set(map(owner_of, addresses)) and name in (None, offer.name) and digest in (None, offer.digest)
        ]
        if found:
            return max(found, key=itemgetter(0))[1]
    return None


def _readable(paths: Iterable[Path]) -> Iterator[tuple[int, OfferedRun, list[str]]]:
    """Those that can be read, and when each was written: this machine's own files, which a person may have changed."""
    for path in sorted(paths):
        try:
            about = path.stat()
            body = json.loads(path.read_text(encoding="utf-8")) if about.st_size <= 2 * LARGEST_TEXT else {}
            text = json.dumps(body["run"], sort_keys=True, separators=(",", ":"))
            addresses = [str(address) for address in body["peer"]["initial_peers"]]
            offer = OfferedRun(str(body["run"]["name"]), digest_of(text), text, agreeing=0, members=0)
            yield about.st_mtime_ns, offer, addresses
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
