"""A peer that is saved within a phase and resumed is, to the bit, the peer that was not interrupted. So is one that was
paused, with model and optimizer on the host, whose memory on the device is free meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from peer.config.schema import Config
from peer.device.memory import release_memory
from peer.rounds.contribution import copy_own
from peer.training.checkpoint import Checkpoints
from peer.training.state import PeerState
from tests.gpu.site import Finding, Site, fast, repeatable
from tests.saved import save_checkpoint

H, STEPS, INTERRUPTED = 4, 10, 6  # steps: in the middle of the second phase
FREED = 0.9  # of the bytes of weights and moments
TWICE = "two runs without an interruption differ on this device"


def check(site: Site) -> Iterator[Finding]:
    for precision in ("fp32", "bf16"):
        config = site.config(f"peer.precision={precision}", f"run.inner_steps={H}", "run.inner.warmup_steps=0")
        with repeatable():
            yield _resumed(site, config, precision)
            yield _paused(site, config, precision)
    config = site.config("peer.offload=optimizer", f"run.inner_steps={H}", "run.inner.warmup_steps=0")
    with repeatable():
        yield _paused(site, config, "fp32 with offload")


def _resumed(site: Site, config: Config, precision: str) -> Finding:
    subject = f"resume in {precision}"
    whole, again = site.replica(config), site.replica(config)
    expected, control = run(whole, STEPS), run(again, STEPS)
    interrupted, resumed = site.replica(config), site.replica(config)
    losses = run(interrupted, INTERRUPTED)
    folder = site.folder / f"resume-{precision}"
    store = Checkpoints(folder, 1)
    save_checkpoint(store, interrupted.inner.step, interrupted.scalars(), interrupted.tensors())
    run(resumed, 2)  # a state that has to go
    saved = Checkpoints(folder, 1).newest(resumed.refusal)
    if saved is None:
        return Finding(subject, False, "the checkpoint cannot be read")
    resumed.restore(saved)
    unlike = differing(resumed, interrupted)
    if unlike:
        return Finding(subject, False, f"after the resume {unlike} differ from what was saved")
    losses += run(resumed, STEPS - INTERRUPTED)
    if differing(again, whole) or control != expected:
        return Finding(subject, None, f"all that was saved comes back to the bit; {TWICE}, so later steps do not tell")
    unlike = differing(resumed, whole) or ("the losses" if losses != expected else "")
    words = (
        f"{unlike} differ after {STEPS} steps"
        if unlike
        else f"the same bits after {STEPS} steps, saved at {INTERRUPTED}"
    )
    return Finding(subject, not unlike, words)


def _paused(site: Site, config: Config, precision: str) -> Finding:
    subject = f"pause in {precision}"
    paused = site.replica(config)  # alone on the device: memory that it shared with another one could not be freed
    losses = run(paused, INTERRUPTED)
    moments = 0 if config.peer.offload == "optimizer" else paused.inner.moment_count
    moved = 4 * (paused.outer.slow.numel + moments)
    site.free()
    before = reserved(site)
    paused.move_to(torch.device("cpu"))
    release_memory(site.device)
    freed = before - reserved(site)
    paused.move_to(site.device)
    losses += run(paused, STEPS - INTERRUPTED)
    whole = site.replica(config)
    expected = run(whole, STEPS)
    if site.accelerator and freed < FREED * moved:
        return Finding(subject, False, f"{freed} of {moved} bytes were free while it was on the host")
    unlike = differing(paused, whole) or ("the losses" if losses != expected else "")
    words = f"{unlike} differ" if unlike else f"the same bits after {STEPS} steps, on the host after {INTERRUPTED}"
    return Finding(subject, not unlike, words)


def reserved(site: Site) -> int:
    """Bytes of the device that no other program can have, with what torch keeps for later; 0 on a CPU."""
    site.synchronize()
    return torch.cuda.memory_reserved(site.device) if site.accelerator else 0


def run(state: PeerState, steps: int) -> list[float]:
    """The losses; an outer step alone after every H steps."""
    losses = []
    for _ in range(steps):
        losses.append(state.inner.run(state.stream.take(1)).loss)
        if state.inner.step % H == 0:
            own = torch.empty(state.outer.slow.numel)
            copy_own(state.outer.contribution(), own)  # type: ignore[arg-type]
            state.outer.apply(own)
            state.cross_boundary()
    return losses


def differing(one: PeerState, other: PeerState) -> str:
    """What is not the same bits in the two states; empty when all is."""
    found = [name for name, it in _held(one).items() if not torch.equal(it, _held(other)[name])]
    counters = ("the counters",) if one.counters != other.counters else ()
    position = ("the position",) if one.stream.position != other.stream.position else ()
    return " and ".join((*found, *counters, *position))


def _held(state: PeerState) -> dict[str, Tensor]:
    moments = state.outer.slow.moments(state.inner.optimizer)
    flat = [it.detach().cpu().reshape(-1).float() for _, it in sorted(moments.items())]
    assert state.outer.momentum is not None
    return {
        "θ": fast(state.outer.slow),
        "φ": state.outer.slow.phi,
        "δ": state.outer.momentum,
        "AdamW's moments": torch.cat(flat) if flat else torch.empty(0),
        "the random state": torch.get_rng_state(),
    }
