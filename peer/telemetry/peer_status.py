"""What a peer tells people about itself in its record: fed by the reporter, read when the record is written."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping

from peer import __version__
from peer.rounds.contribution import Averaged
from peer.rounds.types import Outcome
from peer.swarm.directory.records import Report
from peer.telemetry.series import IDLE_PHASES

SHOWN = 3  # partners
WORST = 2  # refused peers


class PeerStatus:
    """Written by the training thread, read by the network thread; a field is replaced as a whole."""

    def __init__(self) -> None:
        self._tokens = self._merges = 0
        self._train_loss: float | None = None
        self._val_loss: float | None = None
        self._partners: tuple[str, ...] = ()
        self._merged_at: float | None = None
        self._refused: Counter[str] = Counter()

    def inner(self, tokens: int, loss: float) -> None:
        """An inner phase ended."""
        self._tokens += tokens
        self._train_loss = _finite(loss)

    def evaluation(self, loss: float) -> None:
        """A validation ended."""
        self._val_loss = _finite(loss)

    def round(self, averaged: Averaged) -> None:
        """A round ended."""
        if averaged.outcome is Outcome.MERGED:
            self._partners, self._merged_at = averaged.partners, time.monotonic()
            self._merges += 1
        elif averaged.reason is not None:
            self._refused = self._refused + Counter(averaged.partners[:1])

    def report(self, totals: Mapping[str, float], members: int) -> Report:
        """As it goes into the record; ``totals`` are the seconds of each phase, ``members`` the live ones."""
        merged_at = self._merged_at
        return Report(
            version=__version__[:24],
            tokens=self._tokens,
            train_loss=self._train_loss,
            val_loss=self._val_loss,
            seconds=round(sum(totals.values()), 2),
            members=members,
            idle_seconds=round(sum(totals[phase] for phase in IDLE_PHASES), 2),
            partners=tuple(name[:64] for name in self._partners[:SHOWN]),
            merges=self._merges,
            merged_ago=None if merged_at is None else round(time.monotonic() - merged_at, 1),
            refused=tuple((name[:64], count) for name, count in self._refused.most_common(WORST)),
        )


def _finite(loss: float) -> float | None:
    return round(loss, 4) if math.isfinite(loss) else None
