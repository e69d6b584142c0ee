"""A Hugging Face ``Trainer`` as a member of a swarm.

    from peer.api.huggingface import OuterLoopCallback
    member = OuterLoopCallback(run="my-run", initial_peers=[ADDRESS])
    Trainer(model, args, train_dataset=..., callbacks=[member]).train()

``Trainer`` needs the package accelerate. A complete program: examples/hf_trainer.py.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peer import logs
from peer.api.loop import INTERRUPTED, OuterLoop
from peer.config.files import replacing
from peer.errors import RunError, one_line

log = logs.get_logger("huggingface")
OUTER_FILE = "outer.pt"  # in each of the trainer's checkpoints
KEY = "noloco"  # of what the trainer's own state says of it


class StepLosses:
    """A forward hook that collects the losses of a step's batches. It knows no peer, so that the model can be copied
    and pickled; in a copy it collects nothing.
    """

    def __init__(self) -> None:
        self.active = False
        self._losses: list[Tensor] = []
        self._summed = False  # they add up to the step's

    def __call__(self, model: nn.Module, inputs: Any, keywords: Mapping[str, Any], output: Any) -> None:
        """After a forward pass."""
        loss = output.get("loss") if self.active and isinstance(output, Mapping) else None
        if model.training and isinstance(loss, Tensor) and loss.requires_grad:
            self._losses.append(loss.detach())
            self._summed = keywords.get("num_items_in_batch") is not None  # then each is a share of the step's

    def __reduce__(self) -> tuple[type[StepLosses], tuple[()]]:
        return StepLosses, ()

    def take(self) -> Tensor | None:
        """Of the step that has ended, nats a token; ``None`` when unknown."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        total = torch.stack(losses).sum()
        return total if self._summed else total / len(losses)


class _Here(threading.local):
    """What a thread trains: one trainer at a time, which tells its callbacks of no exception that ends it."""

    outer: OuterLoop | None = None  # that has joined last


_here = _Here()


class OuterLoopCallback(TrainerCallback):
    """Takes the settings of :meth:`peer.OuterLoop.start`. ``tokens``: of one step of the optimizer; by default the
    trainer's count (``include_num_input_tokens_seen``), or else its number of sequences. ``checkpoint``: the folder to
    resume from, when it has been moved since.

    The trainer's checkpoints hold the peer's state too. Training ends after the run's ``steps``, as after the trainer's
    own last step. A newcomer's learning rate is that of the swarm's step: give each trainer the same schedule over the
    run's steps. Without ``data_seed`` each peer reads shuffled data in an order of its own, by its peer id. The loss of
    each step is read of the model's output, so that a merge that does harm is undone. Where the model has none, is
    compiled by the trainer or runs on several GPUs, it is that of the trainer's log lines, which come too seldom for
    that. An exception in ``train`` does not leave the swarm: :meth:`close` does, or the thread's next ``train``.
    """

    def __init__(self, *, tokens: int | None = None, checkpoint: Path | str | None = None, **settings: Any) -> None:
        self.outer: OuterLoop | None = None
        self._tokens, self._checkpoint, self._settings = tokens, checkpoint, settings
        self._seen = 0
        self._losses = StepLosses()
        self._logged: float | None = None
        self._hook: RemovableHandle | None = None
        self._beginning: tuple[dict[str, Any], list[Any]] | None = None  # the scheduler's state, each group's rate
        self._followed = 0  # the swarm's step to which the schedule was brought last
        self._over = False  # it was said that the learning rate is 0
        self._training = ""  # random id of this training, in its checkpoints

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Join the swarm."""
        self.close()
        if _here.outer is not None:  # an exception has ended its training, as in an earlier cell of a notebook
            _here.outer.close(RunError(INTERRUPTED))
        settings = dict(self._settings)
        known = dict((state.stateful_callbacks or {}).get(KEY) or {})
        self._training = str(known.get("training") or uuid.uuid4().hex)
        if state.global_step:
            saved = self._saved(args, state, str(known.get("folder") or args.output_dir))
            if saved is not None:
                settings["state"] = saved
        said = {"training": self._training, "folder": str(Path(args.output_dir).resolve())}
        state.stateful_callbacks = {**(state.stateful_callbacks or {}), KEY: said}
        self._seen = int(state.num_input_tokens_seen)
        self.outer = OuterLoop.start(parts["model"], optimizer=parts["optimizer"], **settings)
        _here.outer = self.outer
        self._losses.active = not args.torch_compile and args.n_gpu <= 1
        self._hook = parts["model"].register_forward_hook(self._losses, with_kwargs=True)
        self._beginning, self._followed = None, 0
        self._follow(parts.get("lr_scheduler"))
        if args.data_seed is None:
            _shuffle_for(self.outer.peer_id, parts.get("train_dataloader"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """The optimizer has made a step."""
        assert self.outer is not None
        loss, logged, self._logged = self._losses.take(), self._logged, None
        if not self.outer.done:  # the run may have been over when it joined
            self.outer.step(tokens=self._step_tokens(args, state), loss=logged if loss is None else loss)
            self._follow(parts.get("lr_scheduler"))
        if self.outer.done:  # as the trainer's own last step, which a newcomer does not reach
            DefaultFlowCallback().on_step_end(args, replace(state, max_steps=state.global_step), control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """No step may follow."""
        self._leave_at_the_end(state, control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """The trainer logs its loss, and at its end the mean."""
        logged = parts.get("logs") or {}
        self._logged = logged.get("loss", self._logged)
        if {"train_loss", "total_flos"} <= logged.keys():  # only the trainer's last line has both
            self._leave()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """The trainer has written a checkpoint: add the peer's state."""
        assert self.outer is not None
        said = {"training": self._training, "step": state.global_step, "outer": self.outer.state_dict()}
        with replacing(Path(args.output_dir) / f"checkpoint-{state.global_step}" / OUTER_FILE) as new:
            torch.save(said, new)
        self._leave_at_the_end(state, control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Leave the swarm."""
        self._leave()

    def _follow(self, scheduler: Any) -> None:
        """The learning rate of the swarm's step, where it depends on steps alone: near the swarm's end a newcomer would
        train with the rate of a beginner.
        """
        assert self.outer is not None
        scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
        by_steps = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
        if not by_steps or not hasattr(scheduler, "last_epoch"):
            return
        try:
            with warnings.catch_warnings(action="ignore"):  # that the optimizer made no step of its own before
                self._go_back(scheduler)
                while scheduler.last_epoch < self.outer.swarm_step:
                    scheduler.step()
            over = not any(scheduler.get_last_lr()) and scheduler.last_epoch > 0
        except ValueError:  # of a schedule with a last step
            over = True
        if over and not self.outer.done and not self._over:
            log.warning(
                "the learning rate is 0 at the swarm's step %d: the schedule needs the run's steps",
                self.outer.swarm_step,
            )
            self._over = True

    def _go_back(self, scheduler: LRScheduler) -> None:
        """To its beginning, if the swarm's step went back, as after weights were taken from a part of the swarm with
        fewer steps. A trainer that has resumed may be ahead of the swarm. It knows no rates from before its checkpoint.
        """
        groups = scheduler.optimizer.param_groups
        if self._beginning is None:
            self._beginning = deepcopy((scheduler.state_dict(), [group["lr"] for group in groups]))
        state, rates = self._beginning
        assert self.outer is not None
        step, before = self.outer.swarm_step, self._followed
        self._followed = step
        if state["last_epoch"] <= step < min(before, scheduler.last_epoch):
            scheduler.load_state_dict(deepcopy(state))
            for group, rate in zip(groups, rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)  # schedules, too, change it in place
                else:
                    group["lr"] = rate

    def _leave_at_the_end(self, state: TrainerState, control: TrainerControl) -> None:
        """When no step follows: the trainer may load its best weights, into which a running swap would be mixed."""
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._leave()

    def close(self) -> None:
        """Call it after an exception: leave the swarm and wait for nothing. At its end the training has left it."""
        self._leave(RunError(INTERRUPTED))

    def _leave(self, error: RunError | None = None) -> None:
        if _here.outer is self.outer:
            _here.outer = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.outer is not None:
            self.outer.close(error)

    def _saved(self, args: TrainingArguments, state: TrainerState, written: str) -> dict[str, Any] | None:
        """The peer's state of the checkpoint from which the trainer has resumed: it does not say which folder that is.

        ``written``: the ``output_dir`` at that time.
        """
        name, resumed = f"checkpoint-{state.global_step}", args.resume_from_checkpoint
        folders = [it for it in (self._checkpoint, resumed) if isinstance(it, str | Path)]
        folders += [Path(written) / name, Path(args.output_dir) / name]
        for file in dict.fromkeys((Path(it) / OUTER_FILE).resolve() for it in folders):
            if not file.exists():
                continue
            try:
                found = torch.load(file, weights_only=True)
            except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
                log.warning("%s cannot be read: %s", file, one_line(error))
                continue
            if (found.get("training"), found.get("step")) == (self._training, state.global_step):
                return dict(found["outer"])
            log.warning("%s is of another training", file)
        log.warning(
            "no %s of this checkpoint is found: this peer starts as a newcomer; where the folder has been moved, give "
            "OuterLoopCallback(checkpoint=FOLDER)",
            OUTER_FILE,
        )
        return None

    def _step_tokens(self, args: TrainingArguments, state: TrainerState) -> int:
        if self._tokens is not None:
            return self._tokens
        before, self._seen = self._seen, int(state.num_input_tokens_seen)
        return self._seen - before or args.train_batch_size * args.gradient_accumulation_steps


def _shuffle_for(peer_id: str, loader: Any) -> None:
    """Trainers seed the order of their data by ``args.seed``, 42 where it is not set: all peers would read the same
    batches and do the work of one.
    """
    sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if hasattr(sampler, "initial_seed"):  # accelerate's SeedableRandomSampler; it is not used before the first epoch
        sampler.initial_seed += int.from_bytes(hashlib.sha256(peer_id.encode()).digest()[:4], "big")
    else:
        log.warning(
            "peers with these arguments and this data read the same batches in the same order: give each data of its "
            "own, or shuffle it"
        )
