"""Every key of a run in the DHT, its schema and its lifetime. The only place.

The directory of a run has keys ``<run>/members/<level>/<place>`` (buckets.py). Under each key a peer owns the subkey of
its id, and only the holder of the id's key can write it (p2p/dht/authors.py). A record is at most 1 KiB of JSON. What a
node stores for anybody is bounded in p2p/dht/limits.py, whatever the run.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationError

from peer.p2p.dht.authors import owner_of_subkey
from peer.p2p.dht.limits import RECORD
from peer.p2p.stream import Message
from peer.rounds.state import Root
from peer.rounds.types import Count, Name
from peer.swarm.directory.buckets import Bucket

RECORD_BYTES = 1024
LIFETIME = 30.0  # seconds
ANNOUNCE_SECONDS = 7.5  # between two looks at the directory
# Seconds after which a record is written again at the next look. Then it is at most 1.2 looks older, and all others
# have looked for it some seconds before it expires.
WRITTEN_FOR = LIFETIME - 2.8 * ANNOUNCE_SECONDS
READ_TWICE = 4096  # records that are remembered: most of what a reader finds is what it found before
RUNS = "runs"  # key under which some members write the name of their run: a node without a run finds it there
RUNS_LIFETIME = RECORD.lifetime  # the longest that a node stores
RUNS_WRITERS = 2.0  # about how many members of a run write it in that time

Text = Annotated[str, Field(max_length=128)]
OneLine = Annotated[str, Field(pattern=r"^[ -~]*$")]
# Bounds far above what any machine does, so that no sum over a swarm overflows and no member is refused by mistake
LARGEST_LOSS = 3.5e38  # fp32 ends before
Loss = Annotated[float, Field(ge=-LARGEST_LOSS, le=LARGEST_LOSS)]
Rate = Annotated[float, Field(ge=0, le=1e12)]  # tokens a second
Duration = Annotated[float, Field(ge=0, le=1e10)]  # seconds: three centuries


class Report(Message):
    """For people: no other peer acts on it. Counted since the start of the peer's process, times without its pauses."""

    version: Annotated[OneLine, Field(max_length=24)] = ""
    tokens: Count = 0
    train_loss: Loss | None = None
    val_loss: Loss | None = None
    seconds: Duration = 0.0  # in its rounds: who loads or takes the state of a member for long does not train yet
    idle_seconds: Duration = 0.0
    members: Count = 0  # live members that it sees, itself included
    partners: Annotated[tuple[Name, ...], Field(max_length=3)] = ()  # of its last merge; only some of a large group
    merges: Count = 0
    merged_ago: Duration | None = None  # seconds before the record was made
    # the peers whose contributions it refused most, and how often
    refused: Annotated[tuple[tuple[Name, Count], ...], Field(max_length=2)] = ()


NO_REPORT = Report()


class MemberRecord(Message):
    """What a peer tells all others about itself."""

    peer_id: Text
    name: Name
    addresses: Annotated[list[Text], Field(max_length=8)]  # multiaddrs without the peer id
    config: Annotated[OneLine, Field(max_length=64)]  # digest of the run's configuration
    # waiting: for others to begin with; paused: it meets nobody, and gives its state to newcomers
    state: Literal["waiting", "training", "paused", "left"]
    ready: bool = False  # to begin: it has seen all others that it was to wait for
    step: Count
    round: Count
    tokens_per_second: Rate
    metrics: Text | None  # host:port of the Prometheus endpoint
    report: Report = NO_REPORT
    root: Root = ""
    taken: Count = 0  # how often it replaced its weights by those of others since its process started


def members_key(run: str, bucket: Bucket) -> str:
    return f"{run}/members/{bucket.level}/{bucket.place}"


def encode(record: MemberRecord) -> str:
    """JSON of at most ``RECORD_BYTES``: if necessary without names of others, then with fewer addresses."""
    text = record.model_dump_json(exclude_defaults=True)
    report = record.report.model_copy(update={"partners": (), "refused": ()})
    for count in range(len(record.addresses), -1, -1):
        if len(text.encode()) <= RECORD_BYTES:
            break
        shorter = record.model_copy(update={"report": report, "addresses": record.addresses[:count]})
        text = shorter.model_dump_json(exclude_defaults=True)
    return text


def decode(subkey: object, value: object) -> MemberRecord | None:
    """A checked record; ``None`` for anything else that is stored there."""
    if not isinstance(value, str) or len(value) > RECORD_BYTES or not isinstance(subkey, str):
        return None
    return _checked(subkey, value)


@lru_cache(READ_TWICE)
def _checked(subkey: str, text: str) -> MemberRecord | None:
    try:
        record = MemberRecord.model_validate_json(text)
    except ValidationError:
        return None
    return record if record.peer_id == owner_of_subkey(subkey).peer_id else None


class Program(NamedTuple):
    """Whose record it is, and what its author runs."""

    peer_id: str
    name: str
    version: str


def program_of(subkey: object, value: object) -> Program | None:
    """Author and program version of a record that :func:`decode` does not accept; ``None`` for anything else."""
    if not isinstance(value, str) or len(value) > RECORD_BYTES or not isinstance(subkey, str):
        return None
    try:
        record = json.loads(value)
        peer_id, name, version = record["peer_id"], str(record["name"]), str(record["report"]["version"])
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    one_line = (name + version).isprintable() and len(name) <= 64 and len(version) <= 24
    return Program(peer_id, name, version) if one_line and peer_id == owner_of_subkey(subkey).peer_id else None
