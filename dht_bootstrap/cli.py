"""``noloco-bootstrap``: start a bootstrap node and print the addresses by which peers join.

For a swarm of invited peers (``run.admission: invite``) add ``--owner owner.key``; owner.py has the owner's commands.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from functools import partial
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

from peer import __version__, logs
from peer.errors import RunError, UserError, run_command, tell
from peer.process import Signals, Stop, begin_command, stop_with_parent

if TYPE_CHECKING:
    from peer.p2p.admission.dht_rules import Authority

DEFAULT_DHT_PORT = 31337
DEFAULT_HTTP_PORT = 9400
WATCH_SECONDS = 0.5
FOLLOW_SECONDS = 5.0  # between two looks at the node's addresses, and two readings of the owner's book
SAVE_SECONDS = 60.0  # between two writings of the contributors

log = logs.get_logger("bootstrap")


def main(arguments: list[str] | None = None) -> None:
    """Run until asked to stop, or one of the owner's commands, and exit."""
    begin_command()
    args = _parser().parse_args(arguments)
    sys.exit(run_command("bootstrap", partial(args.run, args)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="noloco-bootstrap", description="The address by which peers find a swarm.")
    parser.add_argument("--version", action="version", version=f"noloco-bootstrap {__version__}")
    parser.add_argument("--host", type=_ipv4, default="0.0.0.0", help="IPv4 address to listen on (default: all)")
    parser.add_argument("--port", type=_port, default=DEFAULT_DHT_PORT, help="TCP port (default %(default)s; 0: any)")
    parser.add_argument("--announce", nargs="+", default=[], metavar="ADDR", help="multiaddrs to announce instead")
    kept = "key file; keeps the address"
    parser.add_argument("--identity", type=Path, default=Path("bootstrap.key"), metavar="FILE", help=kept)
    given = "what the peers have given to each run (default: the identity's file with .contributors.json)"
    parser.add_argument("--state", type=Path, metavar="FILE", help=given)
    parser.add_argument("--http-host", default="127.0.0.1", help="address of the monitor (default: this machine only)")
    parser.add_argument(
        "--http-port", type=_port, default=DEFAULT_HTTP_PORT, help="its port (default %(default)s; 0: any)"
    )
    parser.add_argument(
        "--scrape-networks",
        nargs="+",
        type=IPv4Network,
        metavar="CIDR",
        help="networks that /targets may send Prometheus to, besides a peer's own public address "
        "(default: none; loopback if --host is loopback)",
    )
    parser.add_argument("--initial-peers", nargs="+", default=[], metavar="ADDR", help="other bootstrap nodes to join")
    parser.add_argument("--addresses-file", type=Path, metavar="FILE", help="write the addresses here, one a line")
    parser.add_argument("--owner", type=Path, metavar="FILE", help="key of a swarm of invited peers; made if missing")
    parser.add_argument("--stop-with-parent", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=_serve)
    commands = parser.add_subparsers(metavar="COMMAND", title="for the owner of a swarm of invited peers")
    invite = commands.add_parser("invite", help="write an invitation for one peer")
    invite.add_argument("name")
    invite.add_argument("--days", type=_days, default=90.0, help="days until it expires (default 90)")
    invite.add_argument("--out", type=Path, metavar="FILE", help="default: NAME.invitation")
    invite.set_defaults(run=_invite)
    revoke = commands.add_parser("revoke", help="withdraw the invitations of a name or of a peer id")
    revoke.add_argument("name")
    revoke.set_defaults(run=_revoke)
    for command in (invite, revoke):
        command.add_argument("--owner", type=Path, required=True, metavar="FILE", help="the owner's key")
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError("from 0 to 65535")
    return port


def _ipv4(text: str) -> str:
    try:
        return str(IPv4Address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IPv4 address, such as 0.0.0.0") from None


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= 3650:
        raise argparse.ArgumentTypeError("above 0 and at most 3650")
    return days


def _invite(args: argparse.Namespace) -> None:
    from dht_bootstrap import owner

    if not re.fullmatch(r"[\w.-]{1,64}", args.name):
        raise UserError(f"{args.name}: a name has letters, digits, dots, dashes and underscores, at most 64")
    print(owner.invite(args.owner, args.name, args.days, args.out or Path(f"{args.name}.invitation")))


def _revoke(args: argparse.Namespace) -> None:
    from dht_bootstrap import owner

    print(owner.revoke(args.owner, args.name))


def _publish(key: Path, authority: Authority) -> None:
    from dht_bootstrap import owner

    try:
        owner.publish(key, authority.admission)
    except (UserError, RunError) as error:
        log.warning("revocations stay as they were: %s", error)


def _serve(args: argparse.Namespace) -> None:
    stop = Stop()
    signals = Signals(stop, "leaving")
    if args.stop_with_parent:
        stop_with_parent()
    from dht_bootstrap import owner
    from dht_bootstrap.addresses_file import AddressesFile
    from dht_bootstrap.contributors import Contributors
    from dht_bootstrap.monitor import Monitor
    from dht_bootstrap.targets import default_networks
    from peer.p2p import identity
    from peer.p2p.node import Node
    from peer.p2p.reachability.cloud import announced
    from peer.p2p.settings import NodeSettings

    identity.load_or_create(args.identity)
    authority = owner.authority(args.owner, args.identity) if args.owner else None
    announce, initial_peers = announced(args.host, args.port, tuple(args.announce)), tuple(args.initial_peers)
    settings = NodeSettings(args.identity, args.host, args.port, announce, initial_peers, upnp=True)
    with contextlib.ExitStack() as stack:
        node = Node(settings, authority)
        stack.callback(node.stop)
        signals.emergency = node.kill
        networks = default_networks(args.host) if args.scrape_networks is None else args.scrape_networks
        state = args.state or args.identity.with_name(f"{args.identity.name}.contributors.json")
        contributors = Contributors.kept_in(state)
        monitor = Monitor(node, args.http_host, args.http_port, networks, contributors)
        stack.callback(monitor.save)
        stack.callback(monitor.close)
        node.start()
        monitor.watch()
        addresses = node.addresses
        file = AddressesFile(args.addresses_file, addresses)
        file.follow(addresses)  # it is there for who waits for the first line
        for address in addresses:
            with contextlib.suppress(BrokenPipeError):  # who reads no more, as head -1, ends no node
                tell(f"initial peer: {address}")
        log.info("ready: http=%s identity=%s", monitor.address, args.identity)
        signals.begin_loop()
        looked = saved = time.monotonic()
        while not stop.requested and not node.failure:
            time.sleep(WATCH_SECONDS)
            if time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                monitor.save()
            if time.monotonic() - looked > FOLLOW_SECONDS:
                looked = time.monotonic()
                file.follow(node.addresses)
                if authority is not None:
                    _publish(args.owner, authority)
        if node.failure:
            raise RunError(f"{node.failure}; start the bootstrap node again: its identity file keeps its address")
