"""Compare two peers' runs: the digest of the shared half of a configuration, and the first key that differs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

from peer.config.schema import SwarmRunConfig

LARGEST_TEXT = 16 * 1024  # characters; a run's configuration has 1 to 2 KiB


def shared(section: BaseModel) -> dict[str, Any]:
    """``section`` as JSON values without what is local to a machine."""
    out: dict[str, Any] = {}
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("local"):
            continue
        out[key] = shared(value) if isinstance(value, BaseModel) else value
    return out


def digest(run: SwarmRunConfig) -> str:
    """First 16 hex digits of the SHA-256 of the shared half."""
    return digest_of(canonical(run))


def digest_of(text: str) -> str:
    """The digest of the run whose canonical text this is; the text may be an outsider's."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def canonical(run: SwarmRunConfig) -> str:
    """The shared half as one canonical JSON text, which a peer sends to another whose digest differs."""
    return json.dumps(shared(run), sort_keys=True, separators=(",", ":"))


def first_difference(mine: str, theirs: str) -> str:
    """Names the first key in which two canonical runs differ, with both values. ``theirs`` is untrusted."""
    return difference(mine, theirs) or "no key differs: another version of noloco-peer"


def difference(mine: str, theirs: str, unknown: Collection[str] = ()) -> str:
    """As :func:`first_difference`, without the keys that are ``unknown`` here; empty when no other key differs."""
    if len(theirs) > LARGEST_TEXT:  # a long key of many others would be written out before each of them
        return "the swarm's configuration could not be read"
    try:
        ours, other = _flat(json.loads(mine)), _flat(json.loads(theirs))
    except (ValueError, AttributeError, RecursionError):
        return "the swarm's configuration could not be read"
    keys = [*ours, *(key for key in other if key not in ours)]
    for key in sorted(keys, key=lambda it: it != "outer.name"):  # the defaults of others follow from the method
        if ours.get(key) != other.get(key) and not (key in unknown and ours.get(key) is None):
            here, there = (json.dumps(side[key])[:60] if key in side else "not set" for side in (ours, other))
            shown = f"run.{key}" if key.isprintable() else "run." + json.dumps(key)
            return f"{shown[:100]} is {here} here and {there} there"
    return ""


def goes_on(mine: str, saved: str) -> bool:
    """Can a checkpoint of the canonical run ``saved`` be resumed as the run ``mine``? A run may get another length."""
    try:
        ours, other = ({**json.loads(it), "steps": None} for it in (mine, saved))
    except (ValueError, TypeError, RecursionError):
        return False
    return ours == other


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return out
