"""``from peer import OuterLoop``: three calls that make a member of a swarm out of somebody's own training loop.

    with OuterLoop.start(model, run="my-run", optimizer=optimizer, initial_peers=[ADDRESS]) as outer:
        for batch in loader:
            ...loss.backward(); optimizer.step(); optimizer.zero_grad()
            outer.step(tokens=batch.numel(), loss=loss)

Between two boundaries ``step`` counts. Every H-th call is a boundary: training/blocking.py meets a partner,
swaps and takes the outer step. With ``run.exchange.overlap`` training/overlapped.py does the same in small pieces in
the calls that follow.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from peer import logs
from peer.api.account import Round, StepAccount, learning_rate
from peer.api.config import OwnConfig, resolve
from peer.api.state import OwnState
from peer.api.weights import require_finite, require_same, require_trains, trained
from peer.config.digest import digest
from peer.errors import RunError, UserError
from peer.outer.method import outer_method
from peer.outer.slow_weights import SlowWeights
from peer.process import Stop
from peer.training.member import Membership
from peer.training.resources import open_resources

log = logs.get_logger("outer_loop")

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


class OuterLoop:
    """One member of a swarm. Made by :meth:`start`; used by the thread that trains; ended by :meth:`close`."""

    def __init__(
        self, model: nn.Module, config: OwnConfig, optimizers: tuple[torch.optim.Optimizer, ...], state: Any
    ) -> None:
        named = trained(model)
        require_trains(optimizers, named)
        self._model, self._optimizers, self._process = model, optimizers, os.getpid()
        self._stop, self._account = Stop(), StepAccount()
        self._total = math.inf if config.run.steps is None else config.run.steps
        with ExitStack() as stack:
            device = named[0][1].device
            resources = stack.enter_context(open_resources(config.run, config.peer, device, self._stop))
            stack.enter_context(logs.attached(resources.folder.name, resources.folder.path / "peer.log"))
            outer = outer_method(config.run, SlowWeights(named))
            self._state = OwnState(outer, optimizers, digest(config.run))
            if state is not None:
                self._state.load_state_dict(state)
            self._phase, self._progress = resources.phase, resources.context.progress
            self._member = Membership(
                resources, self._state, total=self._total, tokens=lambda: self._account.tokens_per_step
            )
            stack.callback(self._member.close)
            self._member.join(newcomer_above=-1)  # the program's seed may be another one than the others'
            self._length, self._boundary = self._member.phase_length, self._member.boundary()
            self._training = stack.enter_context(ExitStack())  # holds the phase "inner" while the program trains
            self._phase.lap()
            self._begin()
            self._stack = stack.pop_all()
        atexit.register(self._leave)  # for a program that ends without close()
        if self.done:
            self.close()

    @classmethod
    def start(
        cls,
        model: nn.Module,
        *,
        config: OwnConfig | Path | str | None = None,
        optimizer: Optimizers | None = None,
        state: Mapping[str, Any] | None = None,
        run: str | None = None,
        method: str | None = None,
        inner_steps: int | None = None,
        steps: int | None = None,
        tag: str | None = None,
        initial_peers: Sequence[str] | str | None = None,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Self:
        """Join the swarm: from here on others meet this peer.

        A newcomer's ``model`` takes the weights of a member in place, and ``optimizer`` (one or several) forgets its
        moments. ``config``: a file, where keywords do not say all; ``settings``: any of its keys, as
        ``{"run.exchange.codec": "int8"}``. ``state``: what :meth:`state_dict` gave.

        Raises :class:`peer.UserError` and :class:`peer.RunError`, each with one line.
        """
        keywords = {
            "run": run,
            "method": method,
            "inner_steps": inner_steps,
            "steps": steps,
            "tag": tag,
            "initial_peers": initial_peers,
            "name": name,
        }
        resolved = resolve(config, keywords, settings or {})
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
        return cls(model, resolved, optimizers, state)

    def step(self, tokens: int = 1, loss: float | Tensor | None = None) -> Round | None:
        """The optimizer has made a step, on ``tokens`` tokens. Every H-th call is a boundary and takes the outer step.

        Returns how a round ended, in the call in which it did. ``loss`` (nats a token, not read before the boundary)
        is for those who look at the swarm. Raises :class:`peer.RunError` when this peer cannot go on.
        """
        if self._stop.requested:
            if self.done:
                return None
            raise RunError("OuterLoop.step after OuterLoop.close: start a new one")
        tokens = int(tokens)  # of a tensor as well: what follows writes it down
        if tokens < 0:
            raise UserError(f"OuterLoop.step: tokens is {tokens}; how many has this step trained on?")
        before, counters = self._member.reporter.last, self._state.counters
        self._state.inner.step += 1
        counters.tokens += tokens
        counters.phase_tokens += tokens
        counters.phase_steps_done += 1
        self._account.add(tokens, loss)
        self._progress.tick()
        self._boundary.between_steps()
        if self._length.remaining() <= 0 or self._length.time_up:
            self._cross()
            if self.done:
                self.close()
        return self.last if self._member.reporter.last is not before else None

    def close(self) -> None:
        """Leave the swarm. The model keeps its weights; a swap that is on its way is waited for. Twice is fine."""
        if self._stop.requested or os.getpid() != self._process:  # a forked data loader is not the peer
            return
        try:
            if not self._member.presence.failure:
                self._training.close()
                self._boundary.finish()
        finally:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._stop.requested:
            with contextlib.suppress(KeyboardInterrupt):  # the program's own exception is the one to be seen
                self._leave()

    def _leave(self) -> None:
        if self._stop.requested or os.getpid() != self._process:
            return
        self._stop.request()
        atexit.unregister(self._leave)
        try:
            self._stack.close()
        except KeyboardInterrupt:
            self._member.node.kill()
            raise
        except Exception as error:  # noqa: BLE001 - the program goes on, whatever could not be closed
            log.warning("did not leave cleanly: %s: %s", type(error).__name__, error)

    # -- where it is

    @property
    def swarm_step(self) -> int:
        """Inner steps of the swarm: what a learning rate schedule goes by. A newcomer's does not begin at 0."""
        return self._state.inner.step

    @property
    def done(self) -> bool:
        """The run's ``steps`` are done, and the swarm is left: further steps are the program's own. Never without
        that setting.
        """
        return self.swarm_step >= self._total

    @property
    def round(self) -> int:
        """Rounds that the swarm has completed, as this peer sees it."""
        return self._state.counters.round

    @property
    def members(self) -> int:
        """Live members, this one included."""
        return self._member.presence.size

    @property
    def adopted(self) -> bool:
        """A member's weights were taken, at the start or later: moments of an optimizer that :meth:`start` was not
        given are of no use.
        """
        return self._state.adopted

    @property
    def last(self) -> Round | None:
        """How the last round ended: ``outcome``, ``partners``, ``seconds`` by phase."""
        report = self._member.reporter.last
        return None if report is None else Round.of(report)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Under which others can join: their ``initial_peers``."""
        return self._member.node.addresses

    # -- the user's checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Slow weights, momentum and counters, for a checkpoint beside the model's and the optimizer's."""
        self._member.reporter.saved()
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, when model and optimizer are as they were then. Better: ``start(..., state=state)``."""
        self._state.load_state_dict(state)
        self._training.close()
        self._account.begin()  # what was trained from another state is in no report of this one
        self._member.rejoin()
        self._begin()

    # -- boundaries

    def _begin(self) -> None:
        """The program trains from here on."""
        self._length.begin()
        self._training.enter_context(self._phase("inner"))
        self._boundary.between_steps()

    def _cross(self) -> None:
        self._training.close()  # the phase ends when the accelerator has done its work
        self._length.cut()
        inner = self._account.report(learning_rate(self._optimizers))
        self._member.reporter.inner(inner)
        self._require_sound()
        if self._boundary.cross(inner):
            self._member.join_late()
        self._begin()

    def _require_sound(self) -> None:
        """Before anything of this peer reaches anybody."""
        spans = self._state.outer.slow.spans
        require_same(self._model, spans)
        require_finite(spans, self.swarm_step)
        if self._member.presence.failure:
            raise RunError(f"{self._member.presence.failure}; save your model, then start again")
