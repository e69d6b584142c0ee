"""A peer of two ranks, over NCCL where there are two cards, trains and takes its outer step as on one card."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from peer.rounds.contribution import copy_own
from peer.training.state import PeerState
from tests.gpu.site import Finding, Site, fast, off
from tests.unit.replica import ranks_harness

SAME = {"fp32": 1e-3, "bf16": 2e-2}  # of the loss; the gradients are summed over the ranks in another order
AWAY = 0.1  # of the change of θ
STEPS, ROUNDS = 3, 2


def check(site: Site) -> Iterator[Finding]:
    cards = torch.cuda.device_count() if site.accelerator else 0
    if site.accelerator and cards < 2:
        yield Finding("two ranks over NCCL", None, "there is one card here, two are needed")
        return
    over = "NCCL" if site.accelerator else "gloo"
    for precision in SAME:
        yield _trained(site, precision, f"two ranks over {over} in {precision}")


def _trained(site: Site, precision: str, subject: str) -> Finding:
    config = site.config(f"peer.precision={precision}", "run.inner.warmup_steps=0", "peer.gradient_checkpointing=true")
    folder = site.folder / f"ranks-{precision}"
    folder.mkdir()
    one = ranks_harness.replica(config, device=site.device)
    start = fast(one.outer.slow)
    with ranks_harness.ranks(2, folder, cold=True) as it:
        two = ranks_harness.replica(config, it.ranks, site.device)
        losses = [(_round(one), _round(two)) for _ in range(ROUNDS)]
        worst = max(abs(a - b) / b for b, a in losses)
        away = off(fast(two.outer.slow) - start, fast(one.outer.slow) - start)
        lost = it.ranks.lost
    output = it.output()
    figures = {"loss_difference": worst, "weights_off": away}
    right = worst <= SAME[precision] and away <= AWAY and not lost and not output
    words = (
        lost
        or output.strip()[-200:]
        or f"the losses of one rank within {worst:.1e}; θ is off by {away:.1e} of its change"
    )
    return Finding(subject, right, words, figures)


def _round(state: PeerState) -> float:
    """Inner steps and an outer step alone; the loss of a last inner step after it."""
    state.inner.run(state.stream.take(STEPS))
    own = torch.empty(state.outer.slow.numel)
    copy_own(state.outer.contribution(), own)  # type: ignore[arg-type]
    state.outer.apply(own)
    state.cross_boundary()
    return state.inner.run(state.stream.take(1)).loss
