"""``run`` as another peer sent it: read as data by the strict schema, bounded, and free of anything local.

The text is what :func:`peer.config.digest.canonical` writes. It must be exactly what this version writes of the same
run: so it has no unknown key, none left out, and none that is local to a machine (paths, ``trust_remote_code``).
"""

from __future__ import annotations

import json
import re
import typing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from peer.config.data import BYTES
from peer.config.digest import LARGEST_TEXT, canonical, difference
from peer.config.load import chosen_section, explain
from peer.config.schema import RunConfig, SwarmRunConfig
from peer.errors import UserError

_BEGIN = "the swarm's configuration is not one of this version"
_ANOTHER = "the members run another one, or are not honest"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
# Above those of any published model and run. A machine's memory is compared later, with a model of these sizes.
LARGEST = {
    "batch_size": 2**20,
    "model.hidden_size": 2**17,
    "model.intermediate_size": 2**20,
    "model.layers": 2**10,
    "model.heads": 2**10,
    "model.vocabulary": 2**22,
    "data.sequence_length": 2**20,
    "data.tokenizer.vocabulary": 2**22,
    "data.shuffle": 2**20,
    "evaluation.batches": 2**16,
}
LARGEST_SHUFFLED = 2**28  # tokens in memory


class OwnProgram(UserError):
    """The run has no model in its configuration."""


@dataclass(frozen=True)
class ReceivedRun:
    """``tree``: the sections as JSON values. ``needed``: keys that each machine must say itself, such as
    ``run.data.train``.
    """

    tree: dict[str, Any]
    needed: tuple[str, ...]


def received(text: str, kind: type[SwarmRunConfig] = RunConfig) -> ReceivedRun:
    """Check another peer's canonical text of a ``kind`` of run. Raises :class:`UserError`."""
    if len(text) > LARGEST_TEXT:
        raise UserError(f"the swarm's configuration has {len(text)} characters, more than {LARGEST_TEXT}")
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise UserError("the swarm's configuration is not a JSON object")
    if kind is RunConfig and "model" not in tree:
        raise OwnProgram("its members train by a program of their own (peer.OuterLoop): start that program here too")
    if "model" not in kind.model_fields and "model" in tree:
        raise UserError("its members train by noloco-peer train, not by a program of their own: run noloco-peer join")
    needed = dict(_needed(kind, tree))
    whole = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for (section, key), info in needed.items():
        whole[section].setdefault(key, ("?",) if typing.get_origin(info.annotation) is tuple else "?")
    try:
        with warnings.catch_warnings(action="ignore"):  # load.py says them, with this machine's settings
            run = kind.model_validate(whole)
    except ValidationError as error:
        raise UserError(f"{_BEGIN}: run.{explain(error, whole, kind)[:300]}; {_ANOTHER}") from None
    if canonical(run) != text:
        raise UserError(f"{_BEGIN}: {difference(canonical(run), text) or 'it is not written as here'}; {_ANOTHER}")
    _bounded(tree)
    return ReceivedRun(tree, tuple(f"run.{section}.{key}" for section, key in needed))


def require_hub_tokenizer(tree: dict[str, Any]) -> None:
    """A tokenizer is named by others as on the Hugging Face hub, never by a place on this machine."""
    name = tree["data"]["tokenizer"]["name"]
    if name != BYTES and (HUB_NAME.fullmatch(name) is None or Path(name).exists()):
        raise UserError(
            f"the swarm's tokenizer {name[:100]!r} is no name on the Hugging Face hub; say where it is on this "
            "machine: --set run.data.tokenizer.path=PATH"
        )


def _needed(kind: type[BaseModel], tree: dict[str, Any]) -> Iterator[tuple[tuple[str, str], FieldInfo]]:
    """The required local fields of the chosen sections."""
    for section in kind.model_fields:
        chosen = tree.get(section)
        if not isinstance(chosen, dict):
            continue
        for model in chosen_section(kind.model_fields[section].annotation, chosen.get("name")):
            for key, info in model.model_fields.items():
                local = isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("local")
                if local and info.is_required():
                    yield (section, key), info


def _bounded(tree: dict[str, Any]) -> None:
    for dotted, most in LARGEST.items():
        value: Any = tree
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None and value > most:
            raise UserError(f"the swarm's run.{dotted} is {value}, more than {most}: no run is that large")
    data = tree.get("data", {})
    if data.get("shuffle", 0) * data.get("sequence_length", 0) > LARGEST_SHUFFLED:
        raise UserError(f"the swarm's run.data.shuffle is {data['shuffle']}: that many sequences are held in memory")
