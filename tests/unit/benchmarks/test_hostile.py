"""The slow poison of tests/swarm/support/attacks.py."""

from __future__ import annotations

import torch

from tests.swarm.support.attacks import STEPS, creeping, gradient
from tests.unit.parts import peer_state


def test_a_slow_poison_goes_uphill_as_far_as_nobody_notices_and_leaves_its_model_as_it_was() -> None:
    state = peer_state()
    before = [it.detach().clone() for it in state.inner.model.parameters()]
    s = torch.cat([it.flatten() for it in before])
    changed = 0.01 * torch.randn(len(s), generator=torch.Generator().manual_seed(0))
    step = (creeping(state)(s, changed, 0) - s) / changed.norm()
    assert any(torch.isclose(step.norm(), torch.tensor(length), rtol=1e-3) for length in STEPS)
    assert torch.nn.functional.cosine_similarity(step, gradient(state), dim=0) > 0.3  # of other batches
    assert all(torch.equal(*both) for both in zip(before, state.inner.model.parameters(), strict=True))
    huge = (creeping(state)(s, 1e4 * changed, 0) - s).norm()
    assert huge == 0, "the shortest step would be noticed"
