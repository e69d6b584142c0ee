"""Pre-trained weights are the same in the whole swarm, from any folder; peers with other weights are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.swarm.support.harness import Swarm

LONG = ("run.steps=100000", "run.inner_steps=20")


def weights(folder: Path, seed: int) -> str:
    """Save a pre-trained model; the setting that starts from it."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=257, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=256, eos_token_id=256
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return f"run.model={{name: auto, source: {folder}, pretrained: true}}"


def test_peers_begin_with_the_same_weights_or_not_at_all(swarm: Swarm) -> None:
    here, other = weights(swarm.folder / "here", 1), weights(swarm.folder / "other", 2)
    shutil.copytree(swarm.folder / "here", swarm.folder / "there")
    first = swarm.peer("first", *LONG, here)
    address = first.line(r"ready: .* address=(\S+)").group(1)
    swarm.wait_for_rounds("first", 1)
    second = swarm.peer("second", *LONG, here.replace("/here", "/there"), address=address)
    second.line("outcome=merged partner=first")
    different = swarm.peer("different", *LONG, other, address=address)
    assert different.exit_code(60) == 2, different.output()
    assert "this configuration is not the swarm's: run.model.digest is" in different.output()
    assert "Traceback" not in different.output() + first.output() + second.output()
