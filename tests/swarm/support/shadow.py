"""Checks that every merge is the mean of two contributions that the peers wrote down. Recomputes each in numpy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NEAR = 300 * 10**9  # ns between the two sides' boundaries
LEAST, MOST = 0.1, 0.5  # share of the partner in a mean of two


@dataclass(frozen=True)
class Found:
    """``wrong``: merges that are the mean of no two contributions, as ``peer: file``."""

    merges: int
    wrong: list[str]


def check(folder: Path, names: Sequence[str]) -> Found:
    """``folder / name`` holds the files of a shadowed peer."""
    merges, wrong = 0, []
    offers = {name: _offers(folder / name) for name in names}
    for name in names:
        file = folder / name / "merges.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        for row in (json.loads(line) for line in lines if line.endswith("\n")):
            merges += 1
            own, mean = folder / name / row["own"], np.load(folder / name / row["mean"])
            near = [it for it in offers[row["partner"]] if abs(_time(it) - row["time"]) < NEAR]
            near.sort(key=lambda it: abs(_time(it) - row["time"]))
            if not any(_is_mean(mean, own, other, row["clipped"]) for other in near):
                wrong.append(f"{name}: {row['mean']}")
    return Found(merges, wrong)


def _offers(folder: Path) -> list[Path]:
    return list(folder.glob("*-own-*.npy"))


def _time(file: Path) -> int:
    return int(file.name.partition("-")[0])


def _tokens(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


def _is_mean(mean: np.ndarray, own: Path, theirs: Path, clipped: bool) -> bool:
    """Bit-exact if both weights are equal. A clipped one has a smaller share of the partner, the same in each element:
    the contribution is one part.
    """
    total = _tokens(own) + _tokens(theirs)
    share = min(max(_tokens(theirs) / total, LEAST), MOST) if total else MOST
    one, two = np.load(own), np.load(theirs)
    if clipped:
        apart = (two - one).astype(np.float64)
        taken = float((mean - one) @ apart / (apart @ apart))
        rounding = 1e-6 * float(np.linalg.norm(one) / np.linalg.norm(apart))  # of a mean that is as good as its own
        near = bool(np.allclose(one + taken * apart, mean, rtol=1e-5, atol=1e-6))
        return near and -rounding <= taken <= share + rounding
    if share == MOST:
        return bool(np.array_equal((one + two) * np.float32(0.5), mean))
    return bool(np.allclose((1 - share) * one + share * two, mean, rtol=1e-5, atol=1e-6))
