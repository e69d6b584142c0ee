"""AdamW on the host trains as AdamW on the device: to the bit on a CPU, and up to rounding on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpu.checks.resume import STEPS, H, run
from tests.gpu.site import Finding, Site, fast, off, repeatable

ROUNDING = 0.02  # of θ's change: the two round each step differently, and AdamW enlarges what is near 0


def check(site: Site) -> Iterator[Finding]:
    for subject, overrides in (("offload", ()), ("offload, two micro-batches", (f"peer.micro_batch={half(site)}",))):
        with repeatable():
            yield _trained(site, subject, overrides)


def half(site: Site) -> int:
    return site.config().run.batch_size // 2


def _trained(site: Site, subject: str, overrides: tuple[str, ...]) -> Finding:
    settings = ("peer.precision=fp32", f"run.inner_steps={H}", "run.inner.warmup_steps=0", *overrides)
    plain, offloaded = (
        site.replica(site.config(*settings)),
        site.replica(site.config(*settings, "peer.offload=optimizer")),
    )
    began = fast(plain.outer.slow)
    run(plain, STEPS)
    run(offloaded, STEPS)
    moments = offloaded.outer.slow.moments(offloaded.inner.optimizer)
    if not moments or any(it.device.type != "cpu" for it in moments.values()):
        return Finding(subject, False, "the moments are not on the host")
    weights = fast(plain.outer.slow)
    apart = off(fast(offloaded.outer.slow) - began, weights - began)
    words = f"after {STEPS} steps θ has changed as without it, up to {apart:.1e} of the change"
    return Finding(subject, apart <= (ROUNDING if site.accelerator else 0.0), words, {"theta_off": apart})
