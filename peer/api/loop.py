"""``from peer import OuterLoop``: three calls make a program's own training loop a member of a swarm.

    with OuterLoop.start(model, run="my-run", optimizer=optimizer, initial_peers=[ADDRESS]) as outer:
        while not outer.done:
            ...loss.backward(); optimizer.step(); optimizer.zero_grad()
            outer.step(tokens=batch.numel(), loss=loss)

Every H-th call of ``step`` is a boundary (training/boundaries/). overlapped.py, noloco's default, finds a partner,
swaps and takes the outer step in parts in the next calls; blocking.py does so in that call, and the others only count.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from peer import logs
from peer.api.account import Round, StepAccount, one_number, token_count
from peer.api.config import OwnConfig, of_keywords, resolve, settings_of
from peer.api.shared import of_swarm
from peer.api.state import OwnState
from peer.api.weights import optimizers_of, require_finite, require_no_masters, require_same, require_trains, trained
from peer.config.digest import canonical
from peer.device.accelerator import without_autocast
from peer.errors import RunError
from peer.outer.method import outer_method
from peer.outer.slow_weights import SlowWeights
from peer.process import Stop
from peer.swarm.connect import connect
from peer.training.member import Membership
from peer.training.resources import member_node, open_resources

log = logs.get_logger("outer_loop")

CLOSED = "OuterLoop: it was closed; start a new one"
INTERRUPTED = "OuterLoop: its last step did not end; start a new one, with the state of your last checkpoint"
OVER = "the run's steps are done and this peer has left: what you train now reaches nobody; end your loop at outer.done"


class OuterLoop:
    """One member of a swarm. :meth:`start` makes it, the training thread uses it, :meth:`close` ends it."""

    @without_autocast()
    def __init__(
        self, model: nn.Module, config: OwnConfig, optimizers: tuple[torch.optim.Optimizer, ...], state: Any
    ) -> None:
        named = trained(model)
        require_trains(optimizers, named)
        self._model, self._optimizers, self._process = model, optimizers, os.getpid()
        self._stop, self._account = Stop(), StepAccount()
        self._total = math.inf if config.run.steps is None else config.run.steps
        with ExitStack() as stack:
            resources = stack.enter_context(open_resources(config.run, config.peer, named[0][1].device, self._stop))
            self._logfile = resources.folder.path / "peer.log"
            stack.enter_context(logs.attached(resources.folder.name, self._logfile))
            with resources.timer("join"):
                node = member_node(resources)
                stack.callback(node.stop)
                connect(node, config.run)
                outer = outer_method(config.run, SlowWeights(named))
                self._state = OwnState(outer, optimizers, canonical(config.run), feedback=config.run.exchange.feedback)
                if state is not None:
                    self._state.load_state_dict(state)
                self._rounds_before_step, self._step_ended, self._said_over = 0, True, False
                self._timer, self._progress = resources.timer, resources.context.progress
                self._member = Membership(
                    resources, node, self._state, total=self._total, tokens_per_step=self._account.tokens_per_step
                )
                stack.callback(self._member.close)
                self._member.join()
            self._length, self._boundary = self._member.phase_length, self._member.make_boundary()
            self._training = stack.enter_context(ExitStack())  # the activity "inner" while the program trains
            self._timer.lap()
            self._begin()
            self._stack = stack.pop_all()
        atexit.register(self.close, RunError(INTERRUPTED))  # if the program ends without close(), as after an error
        if self.done:
            self.close()

    @classmethod
    def start(
        cls,
        model: nn.Module,
        *,
        config: OwnConfig | Path | str | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
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
        """Join the swarm. What the program does not say of the run (its H, method, codec, ...) is what the swarm at
        ``initial_peers`` has, and the name too when it trains one run only; if nobody is there, what ``state`` has.

        A newcomer's ``model`` takes the weights of a member in place, but for ``local``, and ``optimizer`` (one or
        several) loses its moments. ``run``: its name; ``method``: ``noloco``, ``diloco``, ``decoupled`` or ``local``;
        ``inner_steps``: H; ``steps``: of the run, when known; ``tag``: what else must be equal at all members, in
        words; ``name``: this peer's. ``config``: a file with more settings; ``settings``: any of its keys, for example
        ``{"run.exchange.codec": "int4"}``. ``state``: a result of :meth:`state_dict`.

        Raises :class:`peer.UserError` and :class:`peer.RunError`, each with one line.
        """
        given = of_keywords(
            run=run, method=method, inner_steps=inner_steps, steps=steps, tag=tag, peers=initial_peers, name=name
        )
        optimizers = optimizers_of(optimizer)
        own = resolve(config, {**given, **settings_of(settings)}, ask=of_swarm, state=state)
        return cls(model, own, optimizers, state)

    @without_autocast()
    def step(self, tokens: int | Tensor = 1, loss: float | Tensor | None = None) -> Round | None:
        """The optimizer has made a step on ``tokens`` tokens. Every H-th call is a boundary and takes the outer step.

        Returns a round in the call in which it ends; with the last step more may end, see :attr:`ended`. ``tokens`` is
        read at once: a tensor on an accelerator makes this call wait for it. ``loss`` (nats a token) is read at the
        boundary, for reports, and in the first calls after a merge: without it a merge that does harm is not undone.
        Raises :class:`peer.RunError` when this peer cannot continue, :class:`peer.UserError` for what is no number.
        """
        logs.on_behalf_of(self._logfile)
        if self._stop.requested:
            if not self.done:
                raise RunError(CLOSED)
            if not self._said_over:
                log.warning(OVER)
            self._said_over = True
            return None
        if not self._step_ended:
            raise RunError(INTERRUPTED)
        tokens, loss = token_count(tokens), None if loss is None else one_number("loss", loss)
        self._rounds_before_step, self._step_ended = self._member.reporter.count, False
        self._state.inner.step += 1
        self._state.inner.loss = loss
        self._state.counters.add(1, tokens)
        self._account.add(tokens, loss)
        self._progress.tick()
        if self._length.remaining() <= 0 or self._progress.time_up:
            self._cross()
        else:
            self._boundary.between_steps()
        self._step_ended = True
        if self.done:
            self.close()
        return self.last if self.ended else None

    @without_autocast()
    def close(self, error: BaseException | None = None) -> None:
        """Wait for a running swap and leave the swarm; at the end of a run with DiLoCo, wait for who takes the weights
        of its last round too. The model keeps its weights. A second call does nothing.

        ``error``: why the program cannot go on. After one nothing is waited for: what the accelerator does may not end.
        """
        if self._stop.requested or os.getpid() != self._process:  # a forked data loader is not the peer
            return
        logs.on_behalf_of(self._logfile)
        if error is None and not self._step_ended:
            error = RunError(INTERRUPTED)
        try:
            if error is None and not self._member.presence.failure:
                self._training.close()
                self._boundary.finish()
                if self.done:
                    self._member.stay()
        finally:
            self._leave(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close(error)
        except KeyboardInterrupt:
            if error is None:  # otherwise it would replace the program's own exception
                raise

    def _leave(self, error: BaseException | None) -> None:
        self._stop.request()
        atexit.unregister(self.close)
        try:
            self._stack.__exit__(*(None, None, None) if error is None else (type(error), error, error.__traceback__))
        except KeyboardInterrupt:
            self._member.node.kill()
            raise
        except Exception as error:  # noqa: BLE001 - the program continues after any error here
            log.warning("did not leave cleanly: %s: %s", type(error).__name__, error)

    # -- position

    @property
    def peer_id(self) -> str:
        """Of this peer in the swarm, the same after a restart: for an order of the data that no other peer has."""
        return self._member.node.peer_id

    @property
    def swarm_step(self) -> int:
        """Inner steps of the swarm, for a learning rate schedule. A newcomer begins at 0 with ``local`` only."""
        return self._state.inner.step

    @property
    def done(self) -> bool:
        """The run's ``steps`` are done, and this peer has left the swarm. Always false without that setting."""
        return self.swarm_step >= self._total

    @property
    def round(self) -> int:
        """Rounds that the swarm has completed, as far as this peer knows."""
        return self._state.counters.round

    @property
    def members(self) -> int:
        """Live members, with this one."""
        return self._member.presence.size

    @property
    def adopted(self) -> bool:
        """A member's weights replaced this peer's. Reset an optimizer that :meth:`start` does not know."""
        return self._state.adopted

    @property
    def last(self) -> Round | None:
        """How the last round ended: ``outcome``, ``partners``, ``seconds`` by activity."""
        report = self._member.reporter.last
        return None if report is None else Round.of(report)

    @property
    def ended(self) -> tuple[Round, ...]:
        """The rounds that have ended since the last call of :meth:`step` began, in their order."""
        reporter = self._member.reporter
        recent = list(reporter.recent)
        return tuple(map(Round.of, recent[len(recent) - (reporter.count - self._rounds_before_step) :]))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of this peer, for the ``initial_peers`` of others."""
        return self._member.node.addresses

    # -- the user's checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Slow weights, momentum and counters, for a checkpoint with the states of model and optimizer."""
        self._member.reporter.saved()
        return self._state.state_dict()

    @without_autocast()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; restore model and optimizer first. Better: ``start(..., state=state)``."""
        if self._stop.requested:
            raise RunError(CLOSED)
        logs.on_behalf_of(self._logfile)
        self._state.require(state)
        self._boundary.abandon()  # its swap is of the weights that the program has replaced
        self._step_ended = True
        self._state.load_state_dict(state)
        self._training.close()
        self._account.begin()  # steps from another state are not reported
        try:
            self._member.rejoin()
        finally:
            self._begin()

    # -- boundaries

    def _begin(self) -> None:
        """The program trains."""
        self._length.begin()
        self._training.enter_context(self._timer("inner"))
        self._boundary.between_steps()

    def _cross(self) -> None:
        self._training.close()  # waits for the accelerator
        self._boundary.cut()
        rate = float(self._optimizers[0].param_groups[0]["lr"]) if self._optimizers else math.nan
        inner = self._account.report(rate)
        self._member.reporter.inner(inner)
        spans = self._state.outer.slow.spans
        require_same(self._model, spans)  # before any weights of this peer are sent
        require_finite(spans, self.swarm_step)
        if not self._member.reporter.count:  # the first boundary: the optimizers have their state
            require_no_masters(self._optimizers, spans)
        if self._member.presence.failure:
            raise RunError(f"{self._member.presence.failure}; save your model, then start again")
        ended = self._boundary.cross(inner)
        if self.done:  # no inner step follows, and nobody else may wait for one
            return
        if ended:
            self._member.join_late()
        self._begin()
