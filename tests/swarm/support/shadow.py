"""Checks that what peers take from one another is what the partner sent in the same meeting. Computes each in numpy.

A correction is a share of the distance of the two contributions. The receiver's bytes name the file in which its
partner wrote its contribution, before it was coded for this receiver: no other contribution counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

EACH = 16  # one part in so many is looked at
ID = "id"  # file with that of a peer
BLOCK = 256
MOST = 0.5  # share of the partner in a mean of two
EXACT = 2.0**-20  # of the largest element: rounding of fp32


@dataclass
class Found:
    """``parts`` that were taken; ``wrong``: files, and why; ``left``: share of blocks whose range was too small."""

    parts: int = 0
    wrong: list[str] = field(default_factory=list)
    blocks: int = 0
    unresolved: int = 0

    @property
    def left(self) -> float:
        return self.unresolved / self.blocks if self.blocks else 0.0


def sent_file(data: bytes | np.ndarray, to: str) -> str:
    """Name of the file of a part that was sent as ``data`` to the peer with the id ``to``."""
    return f"sent-{xxhash.xxh3_128_hexdigest(data)}-{to}.npy"


def check(folder: Path, names: Sequence[str]) -> Found:
    """``folder / name`` holds the files of a shadowed peer."""
    found, files = Found(), {name: folder / name / ID for name in names}
    ids = {name: file.read_text() for name, file in files.items() if file.exists()}
    names_by_id = {peer_id: name for name, peer_id in ids.items()}
    for name in ids:
        for file in sorted((folder / name).glob("taken-*.npz")):
            found.parts += 1
            with np.load(file) as row:
                partner = str(row["partner"])
                wrong = _objection(row, folder / names_by_id.get(partner, partner), ids[name], found)
            if wrong:
                found.wrong.append(f"{name}/{file.name}: {wrong}")
    return found


def _objection(row: Any, partner: Path, me: str, found: Found) -> str:
    """Why the correction is wrong; empty if it is right."""
    sent = partner / sent_file(row["data"], me)
    if not sent.exists():
        return f"{partner.name} sent it nothing of the kind"
    theirs, own, decoded, correction = np.load(sent), row["own"], row["decoded"], row["correction"]
    least = EXACT * np.abs(theirs).max(initial=0.0)
    step = _step(str(row["codec"]), row["data"], theirs)
    kept = _by_block(decoded == own).all(1) & (_by_block(np.abs(theirs - own)).max(1) > step / 2 + least)
    off = np.where(kept, 0.0, _by_block(np.abs(decoded - theirs)).max(1))
    found.blocks, found.unresolved = found.blocks + len(kept), found.unresolved + int(kept.sum())
    if (off > step / 2 * 1.01 + least).any():
        return "what was decoded is not what was sent"
    apart = (decoded - own).astype(np.float64)
    share = float(correction @ apart / max(apart @ apart, 1e-300))
    if not -1e-6 <= share <= MOST + 1e-6:
        return f"a share of {share:.3f} of the partner"
    near = np.allclose(correction, share * apart, rtol=1e-4, atol=1e-5 * np.abs(apart).max(initial=0.0) + 1e-12)
    return "" if near else "the correction is no share of the distance"


def _step(codec: str, data: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The quantisation step of each block: from its first two bytes, or that of fp16."""
    if codec == "fp16":
        return 2 * 2.0**-11 * np.maximum(_by_block(np.abs(theirs)).max(1), 2.0**-14)
    scales = data.reshape(-(-theirs.size // BLOCK), -1)[:, :2].astype(np.uint32)
    return ((scales[:, 0] | scales[:, 1] << 8) << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def _by_block(values: np.ndarray) -> np.ndarray:
    """``[n, BLOCK]``, padded with zeros, which are ``True`` for booleans."""
    padded = np.pad(values, (0, -values.size % BLOCK), constant_values=values.dtype == bool)
    return padded.reshape(-1, BLOCK)
