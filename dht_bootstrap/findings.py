"""Warnings about a run. Each is one sentence that says what is wrong and what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from dht_bootstrap.history import PeerHistory, RunHistory
from dht_bootstrap.refusals import REFUSED_SECONDS

SEES = 0.6  # of the members: a peer that sees fewer may be cut off
SETTLED_SECONDS = 60.0  # seconds after it has joined in which a peer may not know all members
AHEAD, BEHIND = 1.5, 4.0  # seconds; hivemind refuses above 3, and a record is up to some seconds old
SLOW_SHARE = 0.5  # of the median of the tokens a second
OFTEN = 3  # refusals, as in the alert NolocoPeerRefused
# As in the alert NolocoNoMerge. Three boundaries without a merge, and half a round more, because rounds are not equally
# long; merges are known late. After all others were paused or away, a peer has 15 minutes to merge again.
UNMERGED_ROUNDS, MERGE_SLACK, ALONE_GRACE = 3.5, 30.0, 900.0  # rounds; seconds; seconds


class RunFinding(NamedTuple):
    """``peer_id``: the peer that it is about."""

    kind: str
    peer_id: str
    text: str


def findings(run: RunHistory) -> list[RunFinding]:
    live = run.live()
    rates = [peer.record.tokens_per_second for peer in live.values() if peer.record.tokens_per_second > 0]
    usual = median(rates) if len(rates) >= 3 else 0.0
    most = Counter(peer.record.config for peer in live.values()).most_common(1)
    refused = run.refusals.lately()
    members = run.members()
    names = Counter(record.name for record in members)
    can_merge = run.looked - run.few_at > ALONE_GRACE and any(it.report.merged_ago is not None for it in members)
    return [
        RunFinding(kind, peer_id, text)
        for peer_id, peer in live.items()
        for kind, text in (
            *_of_peer(peer, refused[peer_id], len(members), usual, most[0][0]),
            *_of_name(peer.record.name, names[peer.record.name]),
            *(_of_merges(peer, run.looked) if can_merge else ()),
        )
    ]


def _of_peer(peer: PeerHistory, refused: int, members: int, usual: float, most: str) -> Iterator[tuple[str, str]]:
    """Kind and text. ``usual``: tokens a second of the others; ``most``: the configuration that most run."""
    record, report, name = peer.record, peer.record.report, peer.record.name
    if members >= 3 and report.seconds >= SETTLED_SECONDS and report.members < SEES * members:
        said = f"{name} sees {report.members} of {members} members: the swarm may be split"
        yield "split", f"{said}; check its network and its initial peers"
    ahead = peer.clock_ahead()
    if ahead is not None and not -BEHIND <= ahead <= AHEAD:
        side = "ahead of" if ahead > 0 else "behind"
        yield "clock", f"the clock of {name} is about {abs(ahead):.0f} s {side} this node's: set it by NTP"
    if 0 < record.tokens_per_second < SLOW_SHARE * usual:
        said = f"{name} trains {record.tokens_per_second:.0f} tokens/s, half of the others have {usual:.0f} or more"
        yield "straggler", f"{said}; run.inner_time lets unlike peers do what they can in the same time"
    if refused >= OFTEN:
        said = f"others have refused what {name} sent {refused} times in the last {REFUSED_SECONDS / 60:.0f} minutes"
        yield "refused", f"{said}: look at its log, or revoke its invitation"
    if record.config != most:
        said = f"{name} runs another configuration ({record.config[:12]}) than most ({most[:12]}), so nobody meets it"
        yield "config", f"{said}: compare noloco-peer show-config"


def _of_name(name: str, count: int) -> Iterator[tuple[str, str]]:
    """Kind and text. Anybody may take the name of another member."""
    if count > 1:
        said = f"{count} members call themselves {name}: nobody knows which of them others have refused"
        yield "name", f"{said}; set peer.name, and tell them apart by their ids"


def _of_merges(peer: PeerHistory, now: float) -> Iterator[tuple[str, str]]:
    """Kind and text, in a run where peers merge."""
    record, seconds, length = peer.record, peer.unmerged_seconds(now), peer.round_seconds()
    if record.state == "paused" or record.report.members < 2 or length is None:
        return
    if seconds > UNMERGED_ROUNDS * length + MERGE_SLACK:
        said = f"{record.name} has merged with nobody for {seconds:.0f} s, and a round takes it {length:.0f} s"
        yield "stuck", f"{said}: look at its log"
