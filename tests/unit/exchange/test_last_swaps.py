"""The swaps after a run's last inner step, of peers whose weights are in 16 bits or on an accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peer.config.methods import NoLoCoConfig
from peer.exchange.guard import Guard, Judgement
from peer.exchange.pair.mailbox import overlapped_parts
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from tests.unit.late_device import LateDevice

NUMEL = 4000
TRAINED = 0.004  # times a random number: the change of an element in an inner phase


class Peer:
    def __init__(self, number: int, dtype: torch.dtype) -> None:
        weights = 0.02 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(9))
        self.chance = torch.Generator().manual_seed(number)
        self.name, self.guard, self.swaps = str(number), Guard(), 0
        self.weights = nn.Parameter(weights.to(dtype))
        self.outer = NoLoCo(SlowWeights([("weights", self.weights)]), NoLoCoConfig())

    def train(self) -> None:
        change = TRAINED * torch.randn(NUMEL, generator=self.chance)
        self.weights.data.add_(change.to(self.weights.dtype))

    def open(self) -> list[tuple[Tensor, Tensor]]:
        opened = []
        for start, stop in overlapped_parts(NUMEL):
            own, change = torch.empty(stop - start), torch.empty(stop - start)
            fetched = self.outer.slow.fetch(start, stop)
            assert fetched.arrived(wait=True) and self.outer.open(fetched, own, change)
            opened.append((own, change))
        return opened

    def take(self, opened: list[tuple[Tensor, Tensor]], theirs: list[Tensor], partner: str) -> Judgement:
        """Judge the partner's parts, and apply what they change."""
        judgement = self.guard.judgement(partner, NUMEL)
        corrections = [
            (its - own) * judgement.add(start, own, change, its)
            for (start, _), (own, change), its in zip(overlapped_parts(NUMEL), opened, theirs, strict=True)
        ]
        self.swaps += 1
        judgement.verdict(f"{partner} {self.swaps}".encode())
        for (start, _), correction in zip(overlapped_parts(NUMEL), corrections, strict=True):
            self.outer.amend(start, correction)
        return judgement


def swap(one: Peer, two: Peer) -> list[Judgement]:
    first, second = one.open(), two.open()
    return [
        one.take(first, [own for own, _ in second], two.name),
        two.take(second, [own for own, _ in first], one.name),
    ]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, "accelerator"])
def test_one_swap_after_the_run_brings_the_slow_weights_of_two_peers_together(
    kind: torch.dtype | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard clips by a peer's own change. It was what rounding had left, so such peers took nothing of each other."""
    dtype = kind if isinstance(kind, torch.dtype) else torch.float32
    one, two, *others = peers = [Peer(number, dtype) for number in range(4)]
    with LateDevice(monkeypatch) as device:
        if kind == "accelerator":
            for peer in peers:
                device.side_of(peer.outer.slow)
        for partner in (two, *others, two, *others):
            for peer in peers:
                peer.train()
            swap(one, partner)
            swap(*(it for it in peers if it not in (one, partner)))
        for peer in peers:
            peer.outer.end_run()
        apart = (one.outer.slow.phi - two.outer.slow.phi).norm()
        judged = swap(one, two)
        assert apart > 0.05 and (one.outer.slow.phi - two.outer.slow.phi).norm() < 1e-4 * apart
        assert all(it.change == 0 and it.least == 1 for it in judged)
        for peer in (one, two):
            phi, left = peer.outer.slow.phi, peer.weights.data.float() - peer.outer.slow.phi
            assert left.norm() < torch.finfo(dtype).eps * phi.norm()
