"""The check of the churn soak finds a merge that is not the mean of two contributions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.swarm.support.shadow import check

ONE, TWO = np.float32([1, 2, 3]), np.float32([3, 2, 2])


def write(folder: Path, mean: np.ndarray, tokens: int = 10) -> None:
    for name, own, weight in (("a", ONE, 10), ("b", TWO, tokens)):
        (folder / name).mkdir()
        np.save(folder / name / f"5-own-{weight}.npy", own)
    np.save(folder / "a" / "5-mean.npy", mean)
    row = {"time": 5, "own": "5-own-10.npy", "mean": "5-mean.npy", "partner": "b"}
    (folder / "a" / "merges.jsonl").write_text(json.dumps(row) + "\n" + '{"cut off')


def test_a_right_merge_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, (ONE + TWO) / 2)
    assert check(tmp_path, ["a", "b"]).merges == 1
    assert not check(tmp_path, ["a", "b"]).wrong


@pytest.mark.parametrize("mean", [ONE, TWO, np.nextafter((ONE + TWO) / 2, np.float32(9))])
def test_a_merge_that_is_wrong_in_one_bit_is_found(tmp_path: Path, mean: np.ndarray) -> None:
    write(tmp_path, mean)
    assert check(tmp_path, ["a", "b"]).wrong == ["a: 5-mean.npy"]


def test_a_weighted_mean_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, np.float32(0.25) * ONE + np.float32(0.75) * TWO, tokens=30)
    assert not check(tmp_path, ["a", "b"]).wrong
