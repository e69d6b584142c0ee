"""What each peer has given to a run: tokens and merges, over restarts of the peers and of this node.

A record counts since the start of its peer's process, and its peer can write anything into it. So a counter that falls
begins anew, and tokens are believed as far as the time since this node has known the peer allows, at the run's
plausible rate (state_transfer/donors.py). What a peer did before this node first ran is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from peer.config.files import write_whole
from peer.errors import RunError, UserError
from peer.logs import get_logger
from peer.rounds.types import Count, Name
from peer.swarm.directory.records import LIFETIME, MemberRecord
from peer.swarm.state_transfer.donors import plausible_rate

log = get_logger("contributors")

KEPT_CONTRIBUTORS = 1024  # peers of all runs: those that gave most
SHOWN_CONTRIBUTORS = 100  # of each run
STATE_BYTES = 2**20  # a larger file is not read
MERGES_A_SECOND = 10.0  # nobody merges more often
MOST_TOKENS = 2**53  # what JSON's readers hold exactly

UnixSeconds = Annotated[float, Field(ge=0, le=1e11)]  # seconds


class ContributorRow(BaseModel):
    """Of one peer to one run. ``said``: tokens and merges in its last record. ``speed``: its last tokens a second above
    0. ``paid``: its time until then is used up by the tokens that were believed.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    name: Name
    since: UnixSeconds
    seen: UnixSeconds
    paid: UnixSeconds
    tokens: Count = 0
    merges: Count = 0
    said: tuple[Count, Count] = (0, 0)
    speed: Annotated[float, Field(ge=0)] = 0.0

    def see(self, record: MemberRecord, rate: float, now: float) -> None:
        """Its newest record. ``rate``: the most tokens a second that are believed."""
        self.name, self.seen, self.paid = record.name, now, min(self.paid, now)
        if record.state == "paused" or (record.state == "left" and not record.tokens_per_second):
            return  # it has no speed to judge by: its counters are read when it goes on
        said = (record.report.tokens, record.report.merges)
        tokens, merges = (new - old if new >= old else new for new, old in zip(said, self.said, strict=True))
        believed = int(min(tokens, rate * (now - self.paid)))
        self.said = said
        self.tokens = min(self.tokens + believed, MOST_TOKENS)
        self.paid += believed / rate if believed else 0.0
        # not bounded by the tokens: a merge may be told later than its steps
        self.merges = max(self.merges, min(self.merges + merges, int(MERGES_A_SECOND * (now - self.since))))


class Contributors(BaseModel):
    """Also the form of the file. ``looked``: when the directory was read last, in unix seconds; 0 before the first
    time. It has no lock of its own.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    looked: UnixSeconds = 0.0
    runs: dict[Name, dict[Annotated[str, Field(max_length=128)], ContributorRow]] = {}
    _file: Path | None = None
    _written: str = ""

    @classmethod
    def kept_in(cls, file: Path) -> Contributors:
        """Those in ``file``, which :meth:`write` writes; none if there is none. A damaged one is put aside."""
        kept = cls()
        try:
            if file.exists():
                if file.stat().st_size > STATE_BYTES:
                    raise ValueError("it is too large")
                kept = cls.model_validate_json(file.read_bytes())
                if sum(map(len, kept.runs.values())) > KEPT_CONTRIBUTORS:
                    raise ValueError("it has too many peers")
        except OSError as error:
            raise UserError(f"--state {file}: {error.strerror}") from None
        except ValueError:
            kept, aside = cls(), file.with_name(file.name + ".damaged")
            try:
                file.rename(aside)
            except OSError as error:
                raise UserError(f"--state {file}: damaged, and {aside} cannot be written: {error.strerror}") from None
            log.warning("--state %s: damaged; it is %s now, and counting begins anew", file, aside)
        kept._file = file
        return kept

    def see(self, run: str, newest: Sequence[MemberRecord], now: float) -> None:
        """The newest records of the run's members: of those that are live, and of those that have left since."""
        if not newest:
            return
        since = min(self.looked or now, now) - LIFETIME  # a record may be so old when it is read first
        rows = self.runs.setdefault(run, {})
        said = []  # who is paused says no speed, and is no measure of the others
        for record in newest:
            row = rows.setdefault(record.peer_id, ContributorRow(name=record.name, since=since, seen=now, paid=since))
            row.speed = record.tokens_per_second or row.speed
            said.append(record.model_copy(update={"tokens_per_second": row.speed}))
        for record in newest:
            rows[record.peer_id].see(record, plausible_rate(record, said), now)
        self._drop()

    def _drop(self) -> None:
        """Those that gave least, when there are too many: an id costs nothing. Half of the places are for those that
        are there now: a newcomer would begin at nothing at each look.
        """
        rows = ((run, peer_id, row) for run, rows in self.runs.items() for peer_id, row in rows.items())
        most = sorted(rows, key=lambda it: it[2].tokens, reverse=True)
        present = [(run, peer_id) for run, peer_id, row in most if row.seen >= self.looked]  # other runs come after it
        kept = set(present[: KEPT_CONTRIBUTORS // 2])
        others = [(run, peer_id) for run, peer_id, _ in most if (run, peer_id) not in kept]
        for run, peer_id in others[KEPT_CONTRIBUTORS - len(kept) :]:
            del self.runs[run][peer_id]
        self.runs = {run: rows for run, rows in self.runs.items() if rows}

    def view(self, now: float) -> list[dict[str, Any]]:
        """For ``/swarm.json``: the runs by name, each with those that gave most, and with the sums over all."""
        return [_run_view(run, rows, now) for run, rows in sorted(self.runs.items())]

    def write(self, text: str) -> None:
        """Write the file, if it has changed. Training does not depend on it: an error of the disk is logged."""
        if self._file is None or text == self._written:
            return
        self._written = text
        try:
            write_whole(self._file, text)
        except (UserError, RunError) as error:
            log.warning("the contributors are not saved: %s", error)


def _run_view(run: str, rows: dict[str, ContributorRow], now: float) -> dict[str, Any]:
    """Ages in seconds."""
    given = [(peer_id, row) for peer_id, row in rows.items() if row.tokens or row.merges]
    given.sort(key=lambda it: (-it[1].tokens, it[1].name, it[0]))
    return {
        "run": run,
        "tokens": sum(row.tokens for _, row in given),
        "count": len(given),
        "peers": [
            {
                "peer_id": peer_id,
                "name": row.name,
                "tokens": row.tokens,
                "merges": row.merges,
                "since_age": max(0.0, now - row.since),
                "age": max(0.0, now - row.seen),
            }
            for peer_id, row in given[:SHOWN_CONTRIBUTORS]
        ],
    }
