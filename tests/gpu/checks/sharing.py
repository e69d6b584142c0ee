"""Two and four peers that share the device swap with each codec; the merged weights are those of the simulator.

Before each swap the simulator's replicas get the peers' states, so φ and δ must be the same bits after it. In an
overlapped swap both sides train a step while parts are under way, and θ is the same up to that step's rounding.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from peer.commands.simulate.exchanges import OverlappedSwap, average, both_merged, swap
from peer.config import schema
from peer.config.schema import CodecName, Config
from peer.p2p.event_loop import LoopThread
from peer.rounds.contribution import Averaged
from peer.rounds.types import Outcome
from tests.gpu.site import Finding, Site, fast, off, one_thread, repeatable
from tests.gpu.swapping import Sharer, blocking, overlapped, swap_all

MEETINGS = {2: [[(0, 1)]], 4: [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]]}  # a round: who meets whom
ROUNDS = 3
H = 4
STEP_NOISE = 0.02  # of what a step changes: kernels add in any order
BY_HAND = 1e-6  # of φ, without a codec: fp32 against fp64
ROUNDED = 0.02  # of the share that a clipped swap leaves, as its text says it
LOST = 0.8  # of what the merge moves, at most: what a codec rounds away, and blocks that it cannot resolve
UNRESOLVED = 0.34  # share of the swaps in which too many blocks of a first partner may not be resolved
SMALLER = (  # than the other checks' model: there are many swaps
    *("run.model.hidden_size=256", "run.model.intermediate_size=688", "run.model.layers=2"),
    "run.data.sequence_length=128",
)
CODECS: tuple[CodecName, ...] = schema.CODECS["noloco"]


def check(site: Site) -> Iterator[Finding]:
    with repeatable(), one_thread():
        for peers in MEETINGS:
            for overlap in (False, True):
                yield _shared(site, peers, overlap)


def _shared(site: Site, peers: int, overlap: bool) -> Finding:
    faults: list[str] = []
    figures: dict[str, float] = {}
    lost: dict[str, float] = {}
    for codec in CODECS:
        site.synchronize()
        found = Rounds(site, _config(site, codec, overlap), peers).run()
        faults += [f"{codec}: {fault}" for fault in found.faults]
        figures[codec], lost[codec] = found.theta, found.lost
    words = (
        f"φ and δ are the simulator's bits with {', '.join(figures)}; θ is off by at most {max(figures.values()):.1e}"
    )
    name = f"{peers} peers, {'overlapped' if overlap else 'blocking'}"
    return Finding(name, not faults, faults[0] if faults else words, {"theta_off": figures, "lost": lost})


def _config(site: Site, codec: str, overlap: bool) -> Config:
    precision = "bf16" if site.accelerator else "fp32"
    return site.config(
        *(SMALLER if site.accelerator else ()),
        f"run.exchange.codec={codec}",
        f"run.exchange.overlap={str(overlap).lower()}",
        f"run.inner_steps={H}",
        f"peer.precision={precision}",
        "run.inner.warmup_steps=0",
    )


def unresolved(averaged: Averaged) -> bool:
    """int8 and int4 may not resolve a tenth of the first partners' blocks; the simulator's swap ends so too."""
    return averaged.outcome is Outcome.REFUSED and "could not be resolved" in averaged.detail


class Rounds:
    """``faults``: what differed, in words. ``theta``: the largest difference of θ, relative to a step's change.
    ``lost``: the largest share of a merge that the codec has rounded away.
    """

    def __init__(self, site: Site, config: Config, peers: int) -> None:
        self.site, self.config, self.faults = site, config, list[str]()
        self.theta = self.lost = 0.0
        self._overlap = config.run.exchange.overlap
        self._ended: list[bool] = []  # of each peer's swaps: was it refused because of blocks that did not resolve?
        self._network = LoopThread()
        self.peers = [Sharer(site, config, f"peer-{it}", it, self._network) for it in range(peers)]

    def run(self) -> Rounds:
        with contextlib.closing(self._network):
            for round in range(ROUNDS):
                meetings = MEETINGS[len(self.peers)]
                pairs = [(self.peers[one], self.peers[two]) for one, two in meetings[round % len(meetings)]]
                self._round(pairs)
            for peer in self.peers:
                if self._overlap:
                    peer.exchange.close()  # type: ignore[union-attr]
        if sum(self._ended) > UNRESOLVED * len(self._ended):
            self.faults.append(f"{sum(self._ended)} of {len(self._ended)} ends of swaps: too many blocks not resolved")
        return self

    def _round(self, pairs: list[tuple[Sharer, Sharer]]) -> None:
        for peer in self.peers:
            peer.train(H)
            peer.reflect()
        expected = [self._by_hand(*pair) for pair in pairs]
        before = {peer.name: fast(peer.state.outer.slow) for peer in self.peers}
        results = swap_all(self._network, pairs, overlapped if self._overlap else blocking)
        self._require_merged(results)
        partial = {peer.name for peer, it in zip(chain.from_iterable(pairs), results, strict=True) if unresolved(it)}
        details = zip(chain.from_iterable(pairs), (it.detail for it in results), strict=True)
        clipped = {peer.name: re.search(r"clipped to ([\d.]+)", detail) for peer, detail in details}
        for pair, expected_of in zip(pairs, expected, strict=True):
            self._simulate(*pair, merges=not partial & {peer.name for peer in pair})
            for peer in pair:
                self._compare(peer, before[peer.name])
                if peer.name not in partial:
                    self._against_formula(peer, *expected_of[peer.name], clipped[peer.name])
                peer.state.cross_boundary()

    def _require_merged(self, results: list[Averaged]) -> None:
        failed = [it for it in results if it.outcome is not Outcome.MERGED and not unresolved(it)]
        self.faults += [f"{it.outcome}: {it.detail}" for it in failed]
        self._ended += [unresolved(it) for it in results]

    def _by_hand(self, one: Sharer, two: Sharer) -> dict[str, tuple[Tensor, float]]:
        """φ + αδ + mean(βΔ + γφ) − γφ in fp64, and the length by which the partner moves it."""
        it, wide = one.method.settings, self._wide
        phi = {peer.name: wide(peer.state.outer.slow.phi) for peer in (one, two)}
        sent = [
            it.beta * (wide(fast(peer.state.outer.slow)) - phi[peer.name]) + it.gamma * phi[peer.name]
            for peer in (one, two)
        ]
        mean, moved = (sent[0] + sent[1]) / 2, float((sent[0] - sent[1]).norm() / 2)
        return {
            peer.name: (phi[peer.name] * (1 - it.gamma) + it.alpha * wide(peer.method.momentum) + mean, moved)
            for peer in (one, two)
        }

    def _wide(self, vector: Tensor) -> Tensor:
        """In fp64, on the device: on the host it takes more time than all that is checked."""
        return vector.to(self.site.device).double()

    def _against_formula(self, peer: Sharer, expected: Tensor, moved: float, clipped: re.Match[str] | None) -> None:
        """``clipped``: how much of the partner the guard has left in the part of which it took least, if it did."""
        phi = self._wide(peer.state.outer.slow.phi)
        lost = float((phi - expected).norm()) / moved
        if clipped:
            lost -= 1 - float(clipped[1])
        self.lost = max(self.lost, lost)
        plain = self.config.run.exchange.codec == "none"
        if off(phi, expected) > BY_HAND if plain and not clipped else lost > (ROUNDED if plain else LOST):
            self.faults.append(f"φ of {peer.name} is not the formula's: {lost:.1%} of the merge is missing")

    def _simulate(self, one: Sharer, two: Sharer, *, merges: bool) -> None:
        mirrors = one.mirror, two.mirror
        if self._overlap:
            for mirror in mirrors:
                mirror.target = mirror.state.inner.step + H
            simulated = OverlappedSwap(*mirrors, steps=1)
            simulated.run()
            verdicts = simulated.verdicts
        else:
            means, verdicts = swap(*mirrors)
            for mirror, mean in zip(mirrors, means, strict=True):
                mirror.apply(mean if merges else average([mirror])[0])
        if both_merged(verdicts) is not merges:
            self.faults.append(f"the simulator ends otherwise: {[it.detail for it in verdicts]}")

    def _compare(self, peer: Sharer, before: Tensor) -> None:
        real, mirror = peer.state.outer, peer.mirror.pairwise
        if not torch.equal(real.slow.phi, mirror.slow.phi):
            self.faults.append(f"φ of {peer.name} is off by {off(real.slow.phi, mirror.slow.phi):.1e}")
        if not torch.equal(peer.method.momentum, mirror.momentum):
            self.faults.append(f"δ of {peer.name} is off by {off(peer.method.momentum, mirror.momentum):.1e}")
        theta, expected = fast(real.slow), fast(mirror.slow)
        away = 0.0 if torch.equal(theta, expected) else off(theta - before, expected - before)
        self.theta = max(self.theta, away)
        if away > (STEP_NOISE if self._overlap else 0.0):
            self.faults.append(f"θ of {peer.name} is off by {away:.1e} of its change")
