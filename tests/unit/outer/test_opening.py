"""Parts that come from an accelerator: how many are on their way at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peer.config.methods import NoLoCoConfig
from peer.outer.noloco import NoLoCo, PartOpening
from peer.outer.slow_weights import SlowWeights
from tests.unit.late_device import LateDevice

PART = 4


@pytest.mark.parametrize(("count", "at_once"), [(10, 10), (64, 16), (320, 20)])
def test_the_parts_of_a_step_grow_with_the_model(count: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy arrives an inner step later, so with 16 at once a model of 300M would take 74 steps on any line."""
    slow = SlowWeights([("weights", nn.Parameter(torch.zeros(PART * count)))])
    opening = PartOpening(NoLoCo(slow, NoLoCoConfig()), [(PART * it, PART * (it + 1)) for it in range(count)])
    done, steps = 0, 0
    with LateDevice(monkeypatch) as device:
        device.side_of(slow)
        while done < count:
            done += sum(1 for _ in opening.open(range(done, count), steps, wait=False))
            assert device.begun - done <= at_once
            device.complete()
            steps += 1
    assert steps == -(-count // at_once) + 1


def test_a_part_for_which_there_is_no_memory_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as asked for, so the parts after it got its place and the swap never ended."""
    slow = SlowWeights([("weights", nn.Parameter(torch.ones(3 * PART)))])
    opening = PartOpening(NoLoCo(slow, NoLoCoConfig()), [(PART * it, PART * (it + 1)) for it in range(3)])
    fetch, room = slow.fetch, iter([True, False, True, True])

    def fetch_if_there_is_room(start: int, stop: int) -> object:
        if not next(room):
            raise torch.OutOfMemoryError("no memory")
        return fetch(start, stop)

    monkeypatch.setattr(slow, "fetch", fetch_if_there_is_room)
    with pytest.raises(torch.OutOfMemoryError):
        list(opening.open(range(3), 5, wait=True))
    assert [index for index, _, _ in opening.open(range(3), 6, wait=True)] == [0, 1, 2]
    assert opening.steps == {0: 5, 1: 6, 2: 6}
