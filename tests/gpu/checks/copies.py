"""φ in pinned memory, and the copies between them and θ on the device: the same bits as on the CPU.

While a copy is tested the device has a queue of other work, and host buffers are overwritten as soon as the copy's call
returns: a copy that is still under way then takes the poison along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from peer.config.methods import NoLoCoConfig
from peer.device.copies import Copied
from peer.outer.noloco import NoLoCo
from peer.outer.slow_weights import SlowWeights
from peer.replica.inner_loop import batch_loss
from tests.gpu.site import Finding, Site, fast

POISON = math.nan
SETTINGS = NoLoCoConfig(alpha=0.3, beta=0.9, gamma=0.91)
ODD = 99_991  # elements of a part: its borders lie within parameters
ROUNDS = 3


class HostSide:
    """Copies of the CPU's twin as a device's are made, so that both compute the same: without one θ becomes φ itself,
    not θ + (φ − θ).
    """

    def download(self, snapshot: Tensor) -> Copied:
        return Copied(snapshot.clone(), None)

    def upload(self, numel: int, fill: Callable[[Tensor], object]) -> Tensor:
        fill(out := torch.empty(numel))
        return out


class Twins:
    """The same outer method on the device and on the CPU. ``dtype``: of θ; φ is fp32."""

    def __init__(self, site: Site, dtype: torch.dtype = torch.float32) -> None:
        wide = 1024 if site.accelerator else 96
        torch.manual_seed(0)
        layers = [nn.Linear(wide, wide + 3) for _ in range(4)] + [nn.LayerNorm(wide)]
        host = nn.ModuleList(layers).to(dtype)
        device = nn.ModuleList([nn.Linear(wide, wide + 3) for _ in range(4)] + [nn.LayerNorm(wide)]).to(dtype)
        device.load_state_dict(host.state_dict())
        self.site, self.chance = site, torch.Generator().manual_seed(1)
        self.here = NoLoCo(SlowWeights(host.named_parameters()), SETTINGS)
        self.there = NoLoCo(SlowWeights(device.to(site.device).named_parameters()), SETTINGS)
        self.numel = self.here.slow.numel
        self.size = ODD if site.accelerator else 1009

    def random(self, numel: int | None = None) -> Tensor:
        return 0.01 * torch.randn(numel or self.numel, generator=self.chance)

    def train(self) -> None:
        """Change θ of both alike. On the device this is queued behind other work and not waited for."""
        changes = [self.random(span.parameter.numel()) for span in self.here.slow.spans]
        moved = [it.to(self.site.device) for it in changes]
        self.site.keep_busy()
        with torch.no_grad():
            for outer, given in ((self.here, changes), (self.there, moved)):
                for span, change in zip(outer.slow.spans, given, strict=True):
                    span.parameter.add_(change.view_as(span.parameter).to(span.parameter.dtype))

    def parts(self) -> list[tuple[int, int]]:
        return [(start, min(start + self.size, self.numel)) for start in range(0, self.numel, self.size)]

    def differ(self) -> str:
        """Which of φ, δ and θ are not the same bits; empty when all are."""
        pairs = {
            "φ": (self.here.slow.phi, self.there.slow.phi),
            "δ": (self.here.momentum, self.there.momentum),
            "θ": (fast_of(self.here), fast_of(self.there)),
        }
        return " and ".join(name for name, (one, other) in pairs.items() if not torch.equal(one, other))


def fast_of(outer: NoLoCo) -> Tensor:
    """θ as it is: a copy by torch and not by the product's code."""
    return torch.cat([span.parameter.detach().cpu().float().reshape(-1) for span in outer.slow.spans])


def check(site: Site) -> Iterator[Finding]:
    twins = Twins(site)
    pinned = twins.there.slow.phi.is_pinned() if site.accelerator else None
    words = f"φ is in {'pinned' if pinned else 'ordinary'} memory"
    yield Finding("pinned memory", pinned, words if site.accelerator else "a CPU needs none")
    for name, work in (("θ ← φ", _write), ("θ to the host", _read), ("θ += correction", _add), ("batches", _batches)):
        for dtype in (torch.float32, torch.bfloat16):
            if work is not _batches or dtype is torch.float32:
                yield _copied(site, name, work, dtype)
    yield _outer(site, Twins(site), "outer step, blocking", _blocking)
    twins = Twins(site)
    if site.accelerator:
        twins.here.slow._side = HostSide()  # type: ignore[assignment]
    yield _outer(site, twins, "outer step, part by part", _part_by_part)


def _copied(site: Site, name: str, work: Any, dtype: torch.dtype) -> Finding:
    twins, wrong, busy = Twins(site, dtype), 0, 0
    for _ in range(ROUNDS):
        right, was_busy = work(site, twins)
        wrong, busy = wrong + (not right), busy + was_busy
    late = "while other work was queued" if site.accelerator else "without a queue of other work, on a CPU"
    enough = busy == ROUNDS or not site.accelerator
    words = (
        f"{ROUNDS - wrong} of {ROUNDS} copies right to the bit, {busy if site.accelerator else ROUNDS} of them {late}"
    )
    return Finding(f"{name}, {str(dtype).removeprefix('torch.')}", wrong == 0 and enough, words, {"wrong": wrong})


def _queued(site: Site, twins: Twins) -> torch.cuda.Event | None:
    twins.train()
    return site.keep_busy()


def _still(event: torch.cuda.Event | None) -> bool:
    return event is not None and not event.query()


def _write(site: Site, twins: Twins) -> tuple[bool, bool]:
    """θ ← φ; φ changes as soon as the call returns."""
    phi, event = twins.random(), _queued(site, twins)
    twins.there.slow.phi.copy_(phi)
    busy = _still(event)
    twins.there.slow.write_fast()
    twins.there.slow.phi.fill_(POISON)
    dtype = twins.there.slow.spans[0].parameter.dtype
    return torch.equal(fast_of(twins.there), phi.to(dtype).float()), busy


def _read(site: Site, twins: Twins) -> tuple[bool, bool]:
    """θ, which the queued work still changes, into poisoned buffers, part by part."""
    event = _queued(site, twins)
    busy, out = _still(event), torch.full((twins.numel,), POISON)
    for start, stop in twins.parts():
        twins.there.slow.read_fast(start, out[start:stop])
    return torch.equal(out, fast(twins.here.slow)), busy


def _add(site: Site, twins: Twins) -> tuple[bool, bool]:
    """θ += correction; the correction changes as soon as the call returns."""
    correction, event = twins.random(), _queued(site, twins)
    busy, given = _still(event), correction.clone()
    for start, stop in twins.parts():
        part = given[start:stop]
        twins.there.slow.add_to_fast(part, start)
        part.fill_(POISON)
        twins.here.slow.add_to_fast(correction[start:stop], start)
    return torch.equal(fast_of(twins.there), fast_of(twins.here)), busy


def _batches(site: Site, twins: Twins) -> tuple[bool, bool]:
    """Token ids, whose pinned buffer is freed and used again at once."""
    batch = torch.randint(1000, (16, 513), generator=twins.chance)
    seen: list[Tensor] = []

    def network(input_ids: Tensor) -> SimpleNamespace:
        seen.append(input_ids)
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 1000, device=input_ids.device))

    event = site.keep_busy()
    busy = _still(event)
    batch_loss(network, batch.clone(), site.device, autocast=False)
    if site.accelerator:
        for _ in range(4):
            torch.empty_like(batch, pin_memory=True).fill_(-1)
    return torch.equal(seen[0].cpu(), batch[:, :-1]), busy


def _outer(site: Site, twins: Twins, name: str, step: Any) -> Finding:
    different = ""
    for _ in range(ROUNDS):
        twins.train()
        mean = twins.random()
        for outer in (twins.here, twins.there):
            step(twins, outer, mean)
        different = different or twins.differ()
    words = (
        f"{different} differ from the CPU's" if different else f"φ, δ and θ are the CPU's bits after {ROUNDS} rounds"
    )
    return Finding(name, not different, words)


def _blocking(twins: Twins, outer: NoLoCo, mean: Tensor) -> None:
    """The mean with a partner whose contribution differs by ``mean``."""
    own = torch.full((twins.numel,), POISON)
    for start, stop in twins.parts():
        outer.contribution().read(start, own[start:stop])
    outer.apply(own.add_(mean))
    own.fill_(POISON)


def _part_by_part(twins: Twins, outer: NoLoCo, mean: Tensor) -> None:
    for start, stop in twins.parts():
        own, change = torch.full((stop - start,), POISON), torch.full((stop - start,), POISON)
        fetched = outer.slow.fetch(start, stop)
        fetched.arrived(wait=True)
        outer.open(fetched, own, change)
        correction = mean[start:stop] + 0.001 * own + 0.001 * change
        outer.amend(start, correction)
        for it in (own, change, correction):
            it.fill_(POISON)
