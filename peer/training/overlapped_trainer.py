"""The loop of a peer that never stands still: the swap runs beside the next inner steps (``run.exchange.overlap``).

inner: H steps of AdamW, and between them parts of the swap → at the boundary: begin to look for the next partner, go on

Previous station: beside.py, the swap itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from peer.config.schema import Config
from peer.rounds.contribution import Averaged
from peer.telemetry.report import Counted
from peer.training.loop import Parts, Training
from peer.training.overlapped import Beside

Report = Callable[[Counted, Averaged], None]


class OverlappedTrainer(Training):
    """Stands nowhere, but at the end of the run and when a swap takes longer than an inner phase."""

    def __init__(self, config: Config, parts: Parts, beside: Callable[[Report], Beside]) -> None:
        super().__init__(config, parts)
        self.beside = beside(self.report)

    def loop(self) -> None:
        phase, beside = self.phase, self.beside
        while not self.done():
            with phase("inner"):
                inner = self.inner.run(self.batches())
            self.account(inner)
            if self.too_early():
                self.parts.state.postpone_boundary()
                continue
            with phase("exchange"):
                beside.finish()
            if self.remaining():
                return
            tokens = self.counters.phase_tokens
            self.parts.state.cross_boundary()
            self.now_and_then()  # before the swap: a partner must not wait while we evaluate
            beside.launch(self.counted(inner), tokens)
        with phase("exchange"):
            beside.finish()

    def too_early(self) -> bool:
        """The last swap is still on its way: train on rather than wait, but at the end of the run."""
        left = self.config.run.steps - self.inner.step
        return self.beside.busy and not self.remaining() and left > self.config.run.inner_steps

    def batches(self) -> Iterator[Tensor]:
        """Training batches up to the next boundary; the swap goes on between them."""
        for batch in super().batches():
            self.beside.pump()
            yield batch
