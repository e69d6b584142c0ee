"""Warnings about a run. Each is one sentence that says what is wrong and what to do. Pure."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import NamedTuple

from dht_bootstrap.history import PeerHistory, RunHistory

SEES = 0.6  # of the members: a peer that sees fewer may be cut off
SETTLED_SECONDS = 60.0  # seconds after its start in which a peer may not know all members
AHEAD, BEHIND = 1.5, 4.0  # seconds; hivemind refuses above 3, and a record is up to some seconds old
SLOW_SHARE = 0.5  # of the median of the tokens a second
OFTEN = 3  # refusals
PERIODS, MERGE_SLACK = 3.0, 30.0  # without a merge; seconds


class RunFinding(NamedTuple):
    """``peer_id``: the peer that it is about."""

    kind: str
    peer_id: str
    text: str


def findings(run: RunHistory) -> list[RunFinding]:
    """All present warnings."""
    live = run.live()
    rates = [peer.record.tokens_per_second for peer in live.values() if peer.record.tokens_per_second > 0]
    usual = median(rates) if len(rates) >= 3 else 0.0
    most = Counter(peer.record.config for peer in live.values()).most_common(1)
    refused = run.refusals()
    found: list[RunFinding] = []
    for peer_id, peer in live.items():
        texts = {
            "split": _split(peer, len(live)),
            "clock": _clock(peer),
            "straggler": _straggler(peer, usual),
            "refused": _refused(peer, refused[peer_id]),
            "config": _config(peer, most[0][0]),
            "stuck": _stuck(peer, len(live)),
        }
        found += [RunFinding(kind, peer_id, text) for kind, text in texts.items() if text]
    return found


def _split(peer: PeerHistory, members: int) -> str:
    sees = peer.record.report.members
    if members < 3 or peer.record.report.seconds < SETTLED_SECONDS or sees >= SEES * members:
        return ""
    return (
        f"{peer.record.name} sees {sees} of {members} members: the swarm may be split; "
        "check its network and its initial peers"
    )


def _clock(peer: PeerHistory) -> str:
    ahead = peer.clock_ahead()
    if ahead is None or -BEHIND <= ahead <= AHEAD:
        return ""
    side = "ahead of" if ahead > 0 else "behind"
    return f"the clock of {peer.record.name} is about {abs(ahead):.0f} s {side} this node's: set it by NTP"


def _straggler(peer: PeerHistory, usual: float) -> str:
    rate = peer.record.tokens_per_second
    if not 0 < rate < SLOW_SHARE * usual:
        return ""
    return (
        f"{peer.record.name} trains {rate:.0f} tokens/s, half of the others have {usual:.0f} or more; "
        "run.inner_time lets unlike peers do what they can in the same time"
    )


def _refused(peer: PeerHistory, count: int) -> str:
    if count < OFTEN:
        return ""
    return f"others have refused what {peer.record.name} sent {count} times: look at its log, or revoke its invitation"


def _config(peer: PeerHistory, most: str) -> str:
    if peer.record.config == most:
        return ""
    return (
        f"{peer.record.name} runs another configuration ({peer.record.config[:12]}) than most ({most[:12]}), so nobody "
        "meets it: compare noloco-peer show-config"
    )


def _stuck(peer: PeerHistory, members: int) -> str:
    report = peer.record.report
    if members < 2 or report.merges < 2 or report.merged_ago is None:
        return ""
    usual = (report.seconds - report.merged_ago) / report.merges
    if report.merged_ago < PERIODS * usual + MERGE_SLACK:
        return ""
    return (
        f"{peer.record.name} has merged with nobody for {report.merged_ago:.0f} s, usually every {usual:.0f} s: "
        "look at its log"
    )
