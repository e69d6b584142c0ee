"""Whose contributions members have refused, as their records tell. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable

from peer.swarm.directory.records import Report

REFUSED_SECONDS = 900.0  # for which a refusal counts for a warning
TELLERS = 2  # members who say so, at least
KEPT_REFUSALS = 10_000  # of a run: the latest


class ToldRefusals:
    """What one peer tells of whom it has refused."""

    def __init__(self, report: Report) -> None:
        self._seconds, self._told = report.seconds, dict(report.refused)  # what its process last said

    def fresh(self, report: Report) -> list[str]:
        """The names of those whom it has refused since it last told.

        A record names the two that were refused most often, or nobody where it has no room.
        """
        known = self._told if report.seconds >= self._seconds else {}  # its process is a new one
        unnamed = min(known.values()) if len(known) > 1 else 0  # others were refused as often, at most
        told = dict(report.refused)
        self._seconds, self._told = report.seconds, told or known
        return [name for name, count in told.items() if count > known.get(name, unnamed)]


class Refusals:
    """Of one run, by the ids of those who were refused. It believes what at least two other members say, because any
    member can accuse any other. In a run of two members one is enough.
    """

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()  # believed ones that this node saw happen
        self._latest: deque[tuple[float, str, str]] = deque(maxlen=KEPT_REFUSALS)  # when, whose, who says so
        self._told: list[str] = []  # those of this look: whose
        self._needed = TELLERS

    def tell(self, teller: str, refused: Iterable[str], now: float) -> None:
        """A member's record was read: it has refused these, each of them once, whatever number it says."""
        for peer_id in refused:
            self._latest.append((now, peer_id, teller))
            self._told.append(peer_id)

    def count(self, members: int) -> None:
        """All records of this look were read; ``members``: live ones."""
        self._needed = min(TELLERS, members - 1)
        told, self._told = self._told, []
        believed = self.lately() if told else {}
        self.total.update(peer_id for peer_id in told if peer_id in believed)

    def lately(self) -> Counter[str]:
        """How often each peer's contributions were refused lately."""
        tellers: defaultdict[str, set[str]] = defaultdict(set)
        for _, peer_id, teller in self._latest:
            tellers[peer_id].add(teller)
        counts = Counter(peer_id for _, peer_id, _ in self._latest)
        return Counter({peer_id: count for peer_id, count in counts.items() if len(tellers[peer_id]) >= self._needed})

    def forget(self, now: float, known: Container[str]) -> None:
        """What is too old, and peers that are not among the ``known`` ids."""
        self.total = Counter({key: count for key, count in self.total.items() if key in known})
        while self._latest and self._latest[0][0] < now - REFUSED_SECONDS:
            self._latest.popleft()
