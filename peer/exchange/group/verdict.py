"""The leader's verdict on a round of a group, by the members' reports, and what a member makes of it. Without network.

The culprit is the member that is named by most of those that report a failure. If only one names it, that one may lie,
or the line between the two may be cut. Then both are suspects, and one of them is left out
(swarm/grouping/known_members.py). If the leader names a member that this peer has not seen fail, that member is left
out only when it is named again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping

from peer import clock
from peer.exchange.group.wire import GroupVerdict, MemberReport
from peer.rounds.types import Assembly, Outcome


def succeeded(report: MemberReport) -> bool:
    return bool(report.digest) and report.outcome is Outcome.MERGED and report.culprit is None


def sane(report: MemberReport, place: int) -> MemberReport:
    """``report``, or a failure of its sender, the member at ``place``, if no honest member sends such a report.

    An honest report has a result, or the outcome of a failure. It names two members only if these contradict each
    other, and then its outcome is ``POISONED``.
    """
    names_two = report.other is not None
    may_name_two = report.culprit not in (None, report.other) and report.outcome is Outcome.POISONED
    has_end = succeeded(report) or report.outcome.failed
    if has_end and (may_name_two or not names_two):
        return report
    detail = "a report that has neither a result nor a failure"
    return MemberReport(culprit=place, outcome=Outcome.CORRUPT, detail=detail)


async def until_decided(coming: Mapping[int, asyncio.Future[MemberReport]], more: float) -> dict[int, MemberReport]:
    """The reports by place: all, or those that have come ``more`` seconds after the first failure. A member that others
    name is not waited for.
    """
    until, reports = math.inf, dict[int, MemberReport]()
    while clock.monotonic() < until:
        named = {report.culprit for report in reports.values()}
        left = [report for place, report in coming.items() if place not in reports and place not in named]
        if not left:
            break
        patience = None if until == math.inf else until - clock.monotonic()
        await asyncio.wait(left, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        reports = {place: report.result() for place, report in coming.items() if report.done()}
        if until == math.inf and not all(map(succeeded, reports.values())):
            until = clock.monotonic() + more
    return reports


def decided(reports: Mapping[int, MemberReport], assembly: Assembly) -> GroupVerdict:
    """The leader's verdict. ``reports``: by place, of all members unless one has failed.

    All use the result if they have the same digest. Otherwise the culprit is a member with the rarest one. That is not
    certain: another member may have sent it another mean.
    """
    if not all(map(succeeded, reports.values())):
        return _blame(reports, assembly)
    held = Counter(report.digest for report in reports.values())
    if len(held) == 1:
        return GroupVerdict(commit=True)
    culprit = min(reports, key=lambda place: (held[reports[place].digest], place == assembly.me))
    detail = f"the result of {assembly.seats[culprit].name} differs from the others'"
    return nobody(Outcome.CORRUPT, detail, culprit, certain=False)


def believed(verdict: GroupVerdict, seen: MemberReport | None) -> GroupVerdict:
    """What a member makes of the leader's verdict. ``seen``: its own report, unless its work was not done."""
    if seen is not None and seen.outcome is Outcome.POISONED:  # whatever the leader says
        return nobody(seen.outcome, seen.detail, *_named(seen), certain=seen.other is None)
    if verdict.commit != (verdict.outcome is Outcome.MERGED) or verdict.outcome is Outcome.ALONE:
        return nobody(Outcome.CORRUPT, "a verdict that contradicts itself", 0)
    if verdict.commit and (seen is None or not succeeded(seen)):
        return nobody(Outcome.CORRUPT, "a verdict before this peer was done")
    if seen is None or seen.culprit not in verdict.culprits or seen.outcome is not verdict.outcome:
        # only the leader says so, or says worse of it than this peer has seen
        return verdict.model_copy(update={"certain": False})
    return verdict


def nobody(outcome: Outcome, detail: str, *culprits: int, certain: bool = True) -> GroupVerdict:
    """Nobody uses the result."""
    return GroupVerdict(commit=False, culprits=culprits, certain=certain, outcome=outcome, detail=detail[:200])


def _blame(reports: Mapping[int, MemberReport], assembly: Assembly) -> GroupVerdict:
    """A member reports a failure. It is certain who made it fail when this peer has seen that, or when two members name
    one and nobody else.
    """
    failed = {place: report for place, report in reports.items() if not succeeded(report)}
    named: dict[int, list[int]] = {}  # by the culprit's place: who says so
    for place, report in failed.items():
        for culprit in _named(report):
            named.setdefault(culprit, []).append(place)
    if not named:
        return nobody(Outcome.TIMEOUT, next(iter(failed.values())).detail)
    culprit = max(named, key=lambda place: (len(named[place]), assembly.me in named[place], -place))
    witnesses = [place for place in named[culprit] if failed[place].other is None] or named[culprit]
    outcomes = Counter(failed[place].outcome for place in witnesses)

    def worth(place: int) -> tuple[bool, int, bool]:
        """What this peer has seen, or most have; of two the milder, as a line may fail while another member lies."""
        outcome = failed[place].outcome
        return place == assembly.me, outcomes[outcome], outcome is Outcome.TIMEOUT

    witness = max(witnesses, key=worth)
    said = failed[witness]
    suspects = _named(said)
    if len(witnesses) == 1 and witness not in (assembly.me, culprit):
        suspects = list(dict.fromkeys((*suspects, witness)))
    return nobody(said.outcome, said.detail, *suspects, certain=len(suspects) == 1)


def _named(report: MemberReport) -> list[int]:
    return [place for place in (report.culprit, report.other) if place is not None]
