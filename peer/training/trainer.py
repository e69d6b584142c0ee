"""The loop of a peer. It gets finished parts, and knows no network and no formula.

inner: H steps of AdamW → crossing.py: match, exchange, apply → a line in the report; now and then a checkpoint
"""

from __future__ import annotations

from peer.config.schema import Config
from peer.training.blocking import Crossing
from peer.training.loop import Parts, Training


class Trainer(Training):
    """Stands at each boundary until its exchange has ended."""

    def __init__(self, config: Config, parts: Parts, crossing: Crossing) -> None:
        super().__init__(config, parts)
        self.crossing = crossing

    def loop(self) -> None:
        while not self.done():
            with self.phase("inner"):
                inner = self.inner.run(self.batches())
            self.account(inner)
            if self.remaining():
                return
            mean = self.crossing.cross()
            self.report(self.counted(inner), mean)
            self.now_and_then()
