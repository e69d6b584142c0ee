"""The recipes in docker/clouds: what of them is ours, as our programs read it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dht_bootstrap.cli import _parser as bootstrap_parser
from peer.commands.cli import _parser as peer_parser
from peer.config import load as settings
from peer.config.schema import Config
from tests.docker.compose import FOLDER, ROOT

CLOUDS = FOLDER / "clouds"
KUBERNETES = CLOUDS / "kubernetes"
UNITS = CLOUDS / "systemd"
README = (CLOUDS / "README.md").read_text(encoding="utf-8")


def peer(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """The configuration of ``train ...``, or this machine's half for ``join ...``.

    An option or a setting that does not exist is an error, and so is a peer that would join nobody.
    """
    moved = [word.replace("/configs/", f"{ROOT}/configs/").replace("/etc/noloco/peer.yaml", DEMO) for word in words]
    args = peer_parser().parse_args(moved)
    assert args.command in ("train", "join")
    named = [f"peer.initial_peers=[{', '.join(args.addresses)}]"] if args.command == "join" and args.addresses else []
    config = settings.load(args.config, [*args.overrides, *named], environment=environment or {})
    assert args.command == "train" or (config.peer.initial_peers and not args.config)
    return config


DEMO = str(ROOT / "configs" / "demo.yaml")


def bootstrap(words: Sequence[str]) -> Any:
    """The options of ``noloco-bootstrap ...``."""
    return bootstrap_parser().parse_args(list(words))


def resources() -> list[dict[str, Any]]:
    """All objects in the manifests."""
    return [it for file in sorted(KUBERNETES.glob("*.yaml")) for it in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """By name."""
    return {it["metadata"]["name"]: it for it in resources() if it["kind"] == kind}


def commands(program: str) -> list[list[str]]:
    """The words of the README's commands that begin with ``program``."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    return [shlex.split(line) for line in blocks.splitlines() if line.startswith(f"{program} ")]


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a systemd unit."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found
