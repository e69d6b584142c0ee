"""Our compose files as docker compose reads them: variables filled in, and the arguments of each program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
FILES = ("compose.yaml", "compose.peer.yaml")
VARIABLE = re.compile(r"\$\{(\w+)(?::(-|\?)([^}]*))?\}")  # the only forms that we use; every compose knows them


class Unset(Exception):
    """A variable that has no default and no value; the text is the message from the file."""


def fill_in(text: str, environment: Mapping[str, str]) -> str:
    """Replace ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?message}``."""

    def value(found: re.Match[str]) -> str:
        name, operator, rest = found.groups()
        if environment.get(name):
            return environment[name]
        if operator == "?":
            raise Unset(f"{name}: {rest}")
        return rest or ""

    return VARIABLE.sub(value, text)


def load(name: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read one of our files. Comments are dropped before variables are filled in, as compose does."""
    given = {"NOLOCO_INITIAL_PEERS": "/ip4/203.0.113.7/tcp/31337/p2p/Qm", **(environment or {})}

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return fill_in(value, given)
        if isinstance(value, dict):
            return {key: walk(inner) for key, inner in value.items()}
        return [walk(inner) for inner in value] if isinstance(value, list) else value

    return {str(key): walk(value) for key, value in yaml.safe_load((FOLDER / name).read_text()).items()}


def ours(name: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The services that run our image."""
    services = load(name, environment)["services"]
    return {key: it for key, it in services.items() if it["image"].startswith("noloco-peer:")}


def words(service: Mapping[str, Any]) -> list[str]:
    """The service's arguments to the image's entrypoint."""
    return shlex.split(service["command"])


def for_old_compose(name: str, folder: Path) -> Path:
    """A copy for docker-compose 1, without two keys that it does not know."""
    kept = [line for line in (FOLDER / name).read_text().splitlines() if not re.match(r"name: |  uts: ", line)]
    path = folder / name
    path.write_text("\n".join(kept) + "\n")
    return path
