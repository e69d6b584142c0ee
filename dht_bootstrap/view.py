"""``/swarm.json``: what the page shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from dht_bootstrap.findings import findings
from dht_bootstrap.history import PeerHistory, Point, RunHistory


def run_view(name: str, run: RunHistory, now: float) -> dict[str, Any]:
    """One run; times are unix seconds, ages seconds. After its end the figures are its last ones."""
    present = list(run.present().values())
    records = [*(peer.record for peer in present), *run.unnamed]
    shares = [share for share in (peer.idle_share() for peer in present) if share is not None]
    refused = run.refusals.lately()
    return {
        "run": name,
        "ended_age": now - run.ended_at if run.ended_at else None,
        "members": len(records),
        "unnamed": len(run.unnamed),  # of the members: they have no row in "peers"
        "step": max((record.step for record in records), default=0),
        "tokens": sum(record.report.tokens for record in records),
        "tokens_per_second": sum(record.tokens_per_second for record in records),
        "idle_share": sum(shares) / len(shares) if shares else None,
        "peers": [
            _peer_view(peer_id, peer, refused[peer_id], now)
            for peer_id, peer in sorted(run.peers.items(), key=lambda item: (item[1].record.name, item[0]))
        ],
        "meetings": _meetings(run, run.ended_at or now),
        "events": [event._asdict() for event in run.events],
        "warnings": [
            {"kind": found.kind, "peer": run.peers[found.peer_id].record.name, "text": found.text}
            for found in findings(run)
        ],
    }


def _peer_view(peer_id: str, peer: PeerHistory, refused: int, now: float) -> dict[str, Any]:
    record, report = peer.record, peer.record.report
    age = max(0.0, now - peer.written)
    return {
        "peer_id": peer_id,
        "name": record.name,
        "state": peer.state,
        "step": record.step,
        "round": record.round,
        "tokens": report.tokens,
        "tokens_per_second": record.tokens_per_second,
        "train_loss": report.train_loss,
        "val_loss": report.val_loss,
        "idle_share": peer.idle_share(),
        "age": age,
        "members": report.members,
        "version": report.version,
        "config": record.config,
        "partners": list(peer.partners),
        "merged_age": None if report.merged_ago is None else report.merged_ago + age,
        "refused": refused,
        "history": [_point(point) for point in peer.curve.points],
    }


def _point(point: Point) -> list[float | int | None]:
    """Rounded, because there are many."""
    share = point.idle_share
    return [round(point.at, 1), point.step, point.train_loss, None if share is None else round(share, 4)]


def _meetings(run: RunHistory, now: float) -> list[dict[str, Any]]:
    """Pairs that merged lately. Both report it, and a report may be missed: the larger count is taken."""
    counts: Counter[tuple[str, str]] = Counter()
    ages: dict[tuple[str, str], float] = defaultdict(lambda: float("inf"))
    for at, teller, partner in run.meetings:
        counts[teller, partner] += 1
        pair = (min(teller, partner), max(teller, partner))
        ages[pair] = min(ages[pair], now - at)
    return [
        {"a": a, "b": b, "age": round(age, 1), "count": max(counts[a, b], counts[b, a])}
        for (a, b), age in sorted(ages.items())
        if a in run.peers and b in run.peers
    ]
