"""A Hugging Face ``Trainer`` as a member of a swarm, by its callback. Needs the package accelerate.

noloco-bootstrap --host 127.0.0.1
python -m peer.api.examples.hf_trainer --initial-peers ADDRESS --set peer.network.host=127.0.0.1    (several times)
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from peer.api.examples import common
from peer.api.huggingface import OuterLoopCallback

LENGTH, BATCH = 64, 8


class Blocks(Dataset[dict[str, Tensor]]):
    """The text in blocks. Labels are the ids; the model shifts them."""

    def __init__(self, data: Tensor) -> None:
        self._blocks = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._blocks[index].long()
        return {"input_ids": ids, "labels": ids}


def network() -> LlamaForCausalLM:
    """A small Llama."""
    torch.manual_seed(0)  # the peers of a new swarm begin with the same weights
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    )


def main() -> None:
    """Train until the swarm has done its steps."""
    args = common.parsed(common.options(__doc__ or ""))
    member = OuterLoopCallback(run="hf-trainer", tokens=BATCH * LENGTH, **common.settings(args))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            max_steps=args.steps,
            learning_rate=3e-3,
            logging_steps=args.inner_steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            data_seed=int(torch.seed() % 2**31),  # but read in different orders
        )
        try:
            Trainer(network(), arguments, train_dataset=Blocks(common.text()), callbacks=[member]).train()
        finally:
            member.close()
    if member.outer is not None and (last := member.outer.last):
        print(f"step {member.outer.swarm_step} round {last.round} {last.outcome}", flush=True)


if __name__ == "__main__":
    common.run(main)
