"""``peer.push``: a checkpoint goes to the Hugging Face hub beside training, by ``noloco-peer export --push``.

That command is a process of its own at the lowest priority, without the GPU, and the first that the kernel ends when
memory is short. There is one at a time. Its failure is one line, and the next due checkpoint is pushed again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from peer import clock
from peer.config.schema import PushConfig
from peer.errors import RunError, UserError
from peer.hub.push import rights
from peer.logs import fields, get_logger
from peer.process import Child, Stop

log = get_logger("push")

PUSH_FOLDER = "push"  # of the peer: the checkpoint that is pushed, the exported model, what the command says
PUSH_SECONDS = 6 * 3600.0  # for one push
END_LOOK = 0.5  # between two looks at the last push of a run
LOWEST_PRIORITY = 19
FIRST_TO_END = "1000"  # of /proc/PID/oom_score_adj
PUSH_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class Pusher:
    """Pushes due checkpoints of the peer in ``folder``. The trainer calls it at boundaries; nothing here waits.

    Only :meth:`close` waits, for the last push of a run that is done. ``hold``: gives a checkpoint's files that stay,
    in a folder.
    """

    def __init__(self, settings: PushConfig, folder: Path, stop: Stop, hold: Callable[[Path, Path], Path]) -> None:
        self._settings, self._folder, self._stop, self._hold = settings, folder / PUSH_FOLDER, stop, hold
        self._process: Child | None = None
        self._step, self._began = 0, 0.0  # of the push that runs
        self._pushed = -1  # the step that is there
        self._going_on = ", training goes on"  # in the line of a failure
        self._last_round: int | None = None
        self._last: Path | None = None  # the run's last checkpoint, which close() waits for

    def say_rights(self) -> None:
        """One line about what a push will do, or why it will fail: at the start, not after a night."""
        try:
            said = rights(self._settings.to, self._settings.private)
        except (UserError, RunError) as error:
            log.warning(
                "pushes %s fail, training goes on: %s", "will" if isinstance(error, UserError) else "may", error
            )
        else:
            log.info("pushes every %d rounds: %s", self._settings.every_rounds, said)

    def saved(self, checkpoint: Path, round: int) -> None:
        """A checkpoint is complete: push it if as many rounds have passed since the last push, or its failure."""
        self.look()
        if self._last_round is None:
            self._last_round = (round - 1) // self._settings.every_rounds * self._settings.every_rounds
        self._last_round = min(self._last_round, round)  # of weights that were taken from members in an earlier one
        due = round - self._last_round >= self._settings.every_rounds and self._process is None
        if due and not self._stop.requested:
            self._last_round = round
            self._start(checkpoint)

    def finish_with(self, checkpoint: Path) -> None:
        """The run is done: :meth:`close` pushes this checkpoint, and waits for it."""
        self._last = checkpoint

    def look(self) -> None:
        """Report a push that has ended; end one that takes too long."""
        if self._process is None:
            return
        code = self._process.exit_code()
        if code is None and clock.monotonic() - self._began < PUSH_SECONDS:
            return
        if code is None:
            self._end(f"not done after {PUSH_SECONDS / 3600:.0f} hours")
        else:
            said = self._process.last_line().removeprefix("error: ")
            self._end("" if code == 0 else said if code > 0 else f"ended by signal {-code}")

    def close(self) -> None:
        """Push the run's last checkpoint and wait for it. When the peer ends before its run, end what runs."""
        self._going_on = ""
        self._wait()
        if self._last is not None and not self._stop.requested and _step(self._last) != self._pushed:
            log.info("the run is done: its last weights are pushed; Ctrl+C leaves without")
            self._start(self._last)
            self._wait()

    def _wait(self) -> None:
        while self._process is not None and self._last is not None and not self._stop.requested:
            self.look()
            clock.sleep(END_LOOK)
        if self._process is not None:
            self._end("the peer has ended before")

    def _start(self, checkpoint: Path) -> None:
        """Start the command. What this machine refuses is one line too."""
        self._step, self._began = _step(checkpoint), clock.monotonic()
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()
            output, model = self._folder / "output", self._folder / "model"
            words = [str(self._hold(checkpoint, self._folder)), str(model), "--no-evaluate"]
            words += ["--push", self._settings.to, *([] if self._settings.private else ["--public"])]
            words += ["--max-upload", self._settings.max_upload] if self._settings.max_upload else []
            self._process = Child("push", "peer", ["export", *words, "--stop-with-parent"], output, PUSH_ENVIRONMENT)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text(FIRST_TO_END)
        except OSError as error:
            if self._process is None:
                self._report(str(error.strerror or error))

    def _end(self, failure: str) -> None:
        assert self._process is not None
        self._process.end()
        self._report(failure)
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _report(self, failure: str) -> None:
        if failure:
            log.warning("step %d is not pushed%s: %s", self._step, self._going_on, failure)
            return
        self._pushed, seconds = self._step, clock.monotonic() - self._began
        log.info("pushed: %s", fields(step=self._step, to=self._settings.to, seconds=seconds))


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])
