"""The check of the churn soak finds a merge that is not the mean of two contributions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.swarm.support.shadow import check

ONE, TWO = np.float32([1, 2, 3]), np.float32([3, 2, 2])


def write(folder: Path, mean: np.ndarray, tokens: int = 10, clipped: bool = False) -> None:
    for name, own, weight in (("a", ONE, 10), ("b", TWO, tokens)):
        (folder / name).mkdir()
        np.save(folder / name / f"5-own-{weight}.npy", own)
    np.save(folder / "a" / "5-mean.npy", mean)
    row = {"time": 5, "own": "5-own-10.npy", "mean": "5-mean.npy", "partner": "b", "clipped": clipped}
    (folder / "a" / "merges.jsonl").write_text(json.dumps(row) + "\n" + '{"cut off')


def test_a_right_merge_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, (ONE + TWO) / 2)
    assert check(tmp_path, ["a", "b"]).merges == 1
    assert not check(tmp_path, ["a", "b"]).wrong


@pytest.mark.parametrize("mean", [ONE, TWO, np.nextafter((ONE + TWO) / 2, np.float32(9))])
def test_a_merge_that_is_wrong_in_one_bit_is_found(tmp_path: Path, mean: np.ndarray) -> None:
    write(tmp_path, mean)
    assert check(tmp_path, ["a", "b"]).wrong == ["a: 5-mean.npy"]


def test_a_mean_with_another_weight_is_found(tmp_path: Path) -> None:
    write(tmp_path, np.float32(0.75) * ONE + np.float32(0.25) * TWO, tokens=0)
    assert check(tmp_path, ["a", "b"]).wrong, "0.1 at least"


def test_a_weighted_mean_is_accepted_up_to_a_half(tmp_path: Path) -> None:
    write(tmp_path, np.float32(0.9) * ONE + np.float32(0.1) * TWO, tokens=0)
    assert not check(tmp_path, ["a", "b"]).wrong


@pytest.mark.parametrize(
    ("taken", "bent", "right"), [(0.3, 0, True), (0.0, 0, True), (0.6, 0, False), (-0.1, 0, False), (0.3, 0.01, False)]
)
def test_a_clipped_merge_lies_between_the_two(tmp_path: Path, taken: float, bent: float, right: bool) -> None:
    mean = np.float32((1 - taken) * ONE + taken * TWO + [0, 0, bent])
    write(tmp_path, mean, clipped=True)
    assert (not check(tmp_path, ["a", "b"]).wrong) is right
