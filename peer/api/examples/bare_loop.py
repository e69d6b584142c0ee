"""A bare PyTorch loop as a member of a swarm.

    noloco-bootstrap --host 127.0.0.1
    python -m peer.api.examples.bare_loop --initial-peers ADDRESS --set peer.network.host=127.0.0.1     (several times)

The lines with ``outer`` make it a member.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from peer import OuterLoop
from peer.api.examples import common

CONTEXT, BATCH = 12, 64


class NextByte(nn.Module):
    """Predicts a byte from the twelve bytes before it."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.layers = nn.Sequential(nn.Linear(16 * CONTEXT, width), nn.GELU(), nn.Linear(width, 256))

    def forward(self, before: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.embed(before).flatten(1))
        return logits


def main() -> None:
    """Train until the swarm has done its steps."""
    args = common.parsed(common.options(__doc__ or ""))
    torch.manual_seed(0)  # the peers of a new swarm begin with the same weights
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data, draw = common.text(), torch.Generator()
    draw.seed()  # but train on different data

    with OuterLoop.start(model, run="bare-loop", optimizer=optimizer, **common.settings(args)) as outer:
        while not outer.done:
            batch = common.windows(data, BATCH, CONTEXT + 1, draw)
            loss = functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if ended := outer.step(tokens=BATCH, loss=loss):
                partners = ", ".join(ended.partners) or "nobody"
                print(f"step {ended.step} loss {loss.item():.3f} {ended.outcome} with {partners}", flush=True)


if __name__ == "__main__":
    common.run(main)
