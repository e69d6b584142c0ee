"""A small GPT as a member of a swarm, with a complete training script: warm-up and cosine, gradient accumulation,
mixed precision, gradient clipping, evaluation, checkpoints.

    noloco-bootstrap --host 127.0.0.1
    python -m peer.api.examples.nano_gpt --initial-peers ADDRESS --set peer.network.host=127.0.0.1      (several times)
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from peer import OuterLoop
from peer.api.examples import common

LAYERS, HEADS, WIDTH, LENGTH, VOCABULARY = 2, 4, 64, 64, 256
BATCH, ACCUMULATED = 4, 2
PEAK, LOWEST, WARMUP = 3e-3, 3e-4, 50
EVERY_ROUNDS = 5  # evaluation and checkpoint
ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICE = ACCELERATOR.type if ACCELERATOR else "cpu"


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        added: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return added


class GPT(nn.Module):
    """Input and output embeddings are one tensor, which is sent once."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._small)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Cross entropy of each next byte."""
        before, after = ids[:, :-1], ids[:, 1:]
        x = self.tokens(before) + self.places(torch.arange(before.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.float().flatten(0, 1), after.flatten())

    @staticmethod
    def _small(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def learning_rate(step: int, steps: int) -> float:
    """By the swarm's step: a newcomer has the same rate as the others."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    share = min(1.0, (step - WARMUP) / max(1, steps - WARMUP))
    return LOWEST + (PEAK - LOWEST) * 0.5 * (1 + math.cos(math.pi * share))


@torch.no_grad()
def evaluate(model: GPT, held_out: Tensor) -> float:
    """Loss on the same batch each time."""
    batch = common.windows(held_out, 32, LENGTH + 1, torch.Generator().manual_seed(1)).to(DEVICE)
    return float(model(batch))


def main() -> None:
    """Train until the swarm has done its steps."""
    parser = common.options(__doc__ or "")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="save here, and resume from it")
    args = common.parsed(parser)
    torch.manual_seed(0)  # the peers of a new swarm begin with the same weights
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    data, draw = common.text(), torch.Generator()
    draw.seed()  # but train on different data
    train, held_out = data[: -(2**16)], data[-(2**16) :]

    saved = None
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    def save() -> None:
        if args.checkpoint:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "outer": outer.state_dict()}
            torch.save(states, args.checkpoint)

    state = None if saved is None else saved["outer"]
    with OuterLoop.start(model, run="nano-gpt", optimizer=optimizer, state=state, **common.settings(args)) as outer:
        while not outer.done:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(outer.swarm_step, args.steps)
            total = torch.zeros((), device=DEVICE)
            for _ in range(ACCUMULATED):
                batch = common.windows(train, BATCH, LENGTH + 1, draw).to(DEVICE)
                with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE != "cpu"):
                    loss = model(batch) / ACCUMULATED
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ended = outer.step(tokens=ACCUMULATED * BATCH * LENGTH, loss=total)
            if ended and ended.round % EVERY_ROUNDS == 0:
                print(f"step {ended.step} held out {evaluate(model, held_out):.3f} {ended.outcome}", flush=True)
                save()
    save()


if __name__ == "__main__":
    common.run(main)
