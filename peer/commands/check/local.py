"""Checks without the network: open files, the port, the identity file."""

from __future__ import annotations

import base64
import errno
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

from peer.commands.check.finding import Finding, Subject, fail, ok, warn
from peer.p2p.addresses import listening
from peer.training.run_folder import is_used

OPEN_FILES = 1024  # the p2p daemon holds up to 512 connections, and the peer two sockets for each stream


def limits() -> Iterator[Finding]:
    """The limit of open files: every connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        advice = f"in the shell that starts the peer: ulimit -n {min(4096, hard) if hard > 0 else 4096}"
        yield warn("open files", f"at most {soft} here, a peer may need {OPEN_FILES}", advice)
    else:
        yield ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def port(config: Subject) -> Iterator[Finding]:
    host, wanted = config.peer.network.host, config.peer.network.port
    try:
        listening(host, wanted).close()
    except PermissionError:
        yield fail("port", f"only root may listen on TCP {wanted}", "set peer.network.port to one above 1023")
    except OSError as error:
        folder = own_folder(config)
        if folder is not None and error.errno == errno.EADDRINUSE:
            yield warn("port", f"TCP {wanted} is in use", f"by the peer that runs in {folder}, if that listens there")
        else:
            yield fail("port", f"cannot listen on {host} TCP {wanted}: {error.strerror}", _other_port(wanted))
    else:
        if wanted:
            yield ok("port", f"TCP {wanted} is free on {host}")
        else:
            yield ok("port", f"any free TCP port of {host}; peer.network.port fixes one, to open it in a firewall")


def port_is_free(host: str, wanted: int) -> bool:
    try:
        listening(host, wanted).close()
    except OSError:
        return False
    return True


def _other_port(wanted: int) -> str:
    if not wanted:
        return "set peer.network.host to 0.0.0.0 or to an address of this machine"
    return f"end what listens there (ss -ltnp 'sport = :{wanted}'), or choose another peer.network.port"


def identity(config: Subject) -> Iterator[Finding]:
    """The file of the key; members.py looks for another process with the same key."""
    if config.run.owner is not None:
        yield from _invitation(config)
        return
    if (folder := own_folder(config)) is not None:
        yield warn("identity", f"a peer runs in {folder}", "a second one on this machine needs another peer.name")
    path = identity_file(config)
    if path is None or not path.exists():
        yield ok("identity", f"a new one will be made{f' in {path}' if path else ''}")
        return
    yield from _private(path)


def _invitation(config: Subject) -> Iterator[Finding]:
    path = config.peer.invitation
    if path is None:
        yield fail("identity", "run.admission is invite", "set peer.invitation to the file that the owner gave you")
    elif not path.exists():
        yield fail("identity", f"the invitation {path} does not exist", "correct peer.invitation")
    else:
        yield from _private(path)


def _private(path: Path) -> Iterator[Finding]:
    try:
        mode = path.stat().st_mode
        path.open("rb").close()
    except OSError as error:
        yield fail("identity", f"{path}: {error.strerror}", "check its owner and permissions")
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield warn("identity", f"others on this machine may read {path} and become this peer", f"chmod 600 {path}")
    else:
        yield ok("identity", f"only its owner may read {path}")


def own_folder(config: Subject) -> Path | None:
    """The folder of this configuration's peer, if that runs now: the check is made beside it.

    It has the configured name. In a swarm with invitations it is also whatever peer has the same invitation.
    """
    named = [config.run.dir / config.peer.name] if config.peer.name is not None else []
    return next(filter(is_used, [*named, *_with_the_same_invitation(config)]), None)


def _with_the_same_invitation(config: Subject) -> Iterator[Path]:
    if config.run.owner is None or config.peer.invitation is None:
        return
    from peer.p2p.admission.invitation import INVITED_KEY, Invitation  # it loads torch

    try:
        key = base64.b64decode(Invitation.model_validate_json(config.peer.invitation.read_bytes()).identity)
        for path in config.run.dir.glob(f"*/{INVITED_KEY}"):
            if path.read_bytes() == key:
                yield path.parent
    except (OSError, ValueError):
        return  # ``identity`` and the node say what is wrong with it


def identity_file(config: Subject) -> Path | None:
    """Path of the peer's key; ``None`` when the peer gets its name at its start."""
    own = config.peer
    if own.identity is not None:
        return own.identity
    return config.run.dir / own.name / "identity.key" if own.name else None
