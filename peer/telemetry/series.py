"""Every Prometheus series of a peer and of the bootstrap node, in one table.

python -m peer.telemetry.series      prints it as Markdown: the table in telemetry/README.md

Names follow the rules of Prometheus: base units, counters end in ``_total``, every label value exists from the start. A
peer's name is a label of the scrape target, not of the peer's series. The bootstrap's series of the peers have it as a
label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from peer.rounds.types import Outcome, Reason

PREFIX = "noloco_"
ACTIVITIES = ("inner", "match", "exchange", "apply", "checkpoint", "eval", "join", "paused")
IDLE_ACTIVITIES = ("match", "exchange")
OUTSIDE_ROUNDS = ("join", "paused")  # these activities are no time of training, neither idle nor other
STATES = ("waiting", "training", "paused", "left", "lost")
SWARM_EVENTS = ("joined", "left", "lost")
WARNINGS = ("split", "clock", "straggler", "refused", "config", "stuck", "name")
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300, 600)
PEER_LABELS = ("run", "peer", "peer_id")  # labels of the bootstrap's series of one peer

Kind = Literal["counter", "gauge", "histogram"]


def running(seconds: Mapping[str, float]) -> float:
    """The time of the activities of rounds, without ``join`` and ``paused``; idle shares are shares of it."""
    return sum(value for activity, value in seconds.items() if activity not in OUTSIDE_ROUNDS)


@dataclass(frozen=True)
class Series:
    """One row. ``values``: all values of the last label, where they are known in advance."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


def _counter(name: str, help: str, **labels: tuple[str, ...]) -> Series:
    """``labels``: each with all its values, or with none where they are not known in advance."""
    return Series(name, "counter", help, tuple(labels), sum(labels.values(), ()))


def _gauge(name: str, help: str, **labels: tuple[str, ...]) -> Series:
    return Series(name, "gauge", help, tuple(labels), sum(labels.values(), ()))


def _of_each(name: str, kind: Kind, help: str, *more: str) -> Series:
    return Series(f"swarm_peer_{name}", kind, help, (*PEER_LABELS, *more))


OF_PEER = (
    _counter(
        "phase_seconds_total",
        "Time spent in each phase; match and exchange are idle time, join and paused are outside of rounds.",
        phase=ACTIVITIES,
    ),
    _gauge("phase_info", "1 for the phase that the peer is in.", phase=ACTIVITIES),
    _counter("rounds_total", "Rounds by outcome of the exchange.", outcome=tuple(Outcome)),
    _counter("refusals_total", "Contributions of partners that were not used, by reason.", reason=tuple(Reason)),
    _counter(
        "unresolved_blocks_total",
        "Blocks of partners' contributions that int8 or int4 could not resolve; they were left as they were.",
    ),
    _counter("exchange_bytes_total", "Bytes of contributions and their protocol.", direction=("sent", "received")),
    Series("exchange_duration_seconds", "histogram", "Duration of the exchanges with a partner."),
    _counter("inner_steps_total", "Inner steps done by this process."),
    _counter("tokens_total", "Tokens trained on by this process."),
    _gauge("round", "Rounds completed, counted by the swarm."),
    _counter("weights_taken_total", "Times that another member's weights replaced this peer's after its start."),
    _gauge("swarm_members", "Live members in the directory, this peer included."),
    _gauge("train_loss", "Mean training loss of the last inner phase, nats a token."),
    _gauge("val_loss", "Last validation loss, nats a token."),
    _gauge("learning_rate", "Learning rate of the last inner step."),
    _gauge("grad_norm", "Gradient norm of the last inner step, before clipping."),
    _gauge("pair_distance", "Distance of the two contributions of the last merge, relative to this peer's own."),
    _gauge(
        "staleness_steps",
        "Inner steps between a part's contribution and its merge in the last round; 0 without overlap.",
    ),
    _gauge(
        "last_merge_timestamp_seconds",
        "Unix time of the last merge, later by the pauses and the machine's sleep since.",
    ),
    _gauge(
        "last_checkpoint_timestamp_seconds",
        "Unix time of this process's last checkpoint, later by the pauses and the machine's sleep since.",
    ),
    _gauge("checkpoint_bytes", "Size of one checkpoint."),
    _gauge("disk_free_bytes", "Free space on the checkpoints' disk, with that of a checkpoint that is being written."),
    _gauge("device_memory_bytes", "Peak GPU memory allocated by this process (Apple's: now, no peak); 0 on a CPU."),
    _gauge("build_info", "1; the labels name what runs here.", version=(), method=(), run=(), config=()),
)

OF_BOOTSTRAP = (
    _of_each("idle_seconds_total", "counter", "Time that the peer has waited for partners and their tensors."),
    _of_each("seconds_total", "counter", "Time that the peer has trained, without the phases join and paused."),
    _of_each("step", "gauge", "Inner steps of the swarm that the peer has reached."),
    _of_each("round", "gauge", "Rounds that the peer has reached."),
    _of_each("tokens_total", "counter", "Tokens that the peer has trained on."),
    _of_each("tokens_per_second", "gauge", "Tokens a second in the peer's inner phases."),
    _of_each("train_loss", "gauge", "The peer's training loss, nats a token."),
    _of_each("val_loss", "gauge", "The peer's validation loss, nats a token."),
    _of_each("members", "gauge", "Live members that the peer sees, itself included."),
    _of_each("refusals_total", "counter", "Refusals of this peer's contributions that others have told of."),
    _of_each("last_seen_timestamp_seconds", "gauge", "Unix time at which the peer wrote its newest record."),
    _of_each("last_merge_timestamp_seconds", "gauge", "Unix time of the peer's last merge."),
    _of_each(
        "info", "gauge", "1; the labels name what the peer runs and its last partner.", "version", "config", "partner"
    ),
    _gauge(
        "swarm_peers",
        "Members by state; those that left or were lost are kept for ten minutes.",
        run=(),
        state=STATES,
    ),
    _gauge("swarm_peers_unnamed", "Members beyond those that the bootstrap node names; they count by state.", run=()),
    _counter("swarm_events_total", "Peers that came, left, or were lost.", run=(), event=SWARM_EVENTS),
    _gauge("swarm_warnings", "Peers that a warning concerns.", run=(), warning=WARNINGS),
    _gauge("dht_connected_peers", "Peers that the bootstrap node is connected to."),
    _counter("dht_reads_total", "Reads of the directory.", result=("ok", "failed")),
    _gauge("dht_read_seconds", "Duration of the last read of the directory."),
    _gauge("bootstrap_info", "1; the labels name what runs here.", version=()),
)


def as_markdown() -> str:
    """The table in Markdown, for telemetry/README.md."""
    lines = ["| series | type | labels | what it says |", "|---|---|---|---|"]
    for place, rows in (("each peer", OF_PEER), ("the bootstrap node", OF_BOOTSTRAP)):
        lines.append(f"| **{place}** | | | |")
        for row in rows:
            labels = ", ".join(row.labels)
            if row.values:
                labels += " = " + ", ".join(row.values)
            lines.append(f"| `{PREFIX}{row.name}` | {row.kind} | {labels} | {row.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
