"""A Hugging Face ``Trainer`` as a member of a swarm.

    from peer.api.huggingface import OuterLoopCallback
    member = OuterLoopCallback(run="my-run", initial_peers=[ADDRESS])
    Trainer(model, args, train_dataset=..., callbacks=[member]).train()

``Trainer`` needs the package accelerate. A complete program: examples/hf_trainer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peer import logs
from peer.api.loop import OuterLoop

log = logs.get_logger("huggingface")
OUTER_FILE = "outer.pt"  # in each of the trainer's checkpoints


class OuterLoopCallback(TrainerCallback):
    """Takes the settings of :meth:`peer.OuterLoop.start`. ``tokens``: of one step of the optimizer; by default the
    trainer's count (``include_num_input_tokens_seen``), or else its number of sequences.

    The trainer's checkpoints hold the peer's state too. Training ends after the run's ``steps``.
    """

    def __init__(self, *, tokens: int | None = None, **settings: Any) -> None:
        self.outer: OuterLoop | None = None
        self._tokens, self._settings = tokens, settings
        self._seen = 0
        self._loss: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Join the swarm."""
        self.close()
        saved = self._file(args, state)
        settings = dict(self._settings)
        if state.global_step and saved.exists():
            settings["state"] = torch.load(saved, weights_only=True)
        elif state.global_step:
            log.warning("no %s: this peer starts as a newcomer", saved)
        self._seen = int(state.num_input_tokens_seen)
        self.outer = OuterLoop.start(parts["model"], optimizer=parts["optimizer"], **settings)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """The optimizer has made a step."""
        assert self.outer is not None
        self.outer.step(tokens=self._step_tokens(args, state), loss=self._loss)
        self._loss = None
        if self.outer.done:
            control.should_training_stop = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """The trainer logs its loss; at its end the mean, before it may load its best weights: a swap that still runs
        would be mixed into those, so this peer leaves here.
        """
        logged = parts.get("logs") or {}
        self._loss = logged.get("loss", self._loss)
        if {"train_loss", "total_flos"} <= logged.keys():  # only the trainer's last line has both
            self.close()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """The trainer has written a checkpoint: add the peer's state."""
        assert self.outer is not None
        torch.save(self.outer.state_dict(), self._file(args, state))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Leave the swarm."""
        self.close()

    def close(self) -> None:
        """Leave the swarm; call it after an exception too."""
        if self.outer is not None:
            self.outer.close()

    def _step_tokens(self, args: TrainingArguments, state: TrainerState) -> int:
        if self._tokens is not None:
            return self._tokens
        before, self._seen = self._seen, int(state.num_input_tokens_seen)
        return self._seen - before or args.train_batch_size * args.gradient_accumulation_steps

    @staticmethod
    def _file(args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / OUTER_FILE
