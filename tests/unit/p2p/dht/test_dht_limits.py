"""Which records a node of any swarm keeps and believes, and that nesting in a message is an error of one request."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from peer.p2p import dht  # its import mends hivemind
from peer.p2p.dht.limits import CLOCKS, RECORD, SUBKEY_BYTES, RecordLimit, within_limits
from peer.p2p.dht.mended import LEVELS
from peer.swarm.directory import records
from tests.swarm.support.packets import nested

LIMITS = {b"list": RecordLimit(5000, 1000.0)}
PLAIN = DHTProtocol.IS_REGULAR_VALUE
CHILD = """
import sys
{mend}
from hivemind.utils import MSGPackSerializer
try:
    MSGPackSerializer.loads(sys.stdin.buffer.read())
except ValueError as error:
    sys.exit(str(error))
"""


def packed(value: object) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def record(
    value: bytes = packed("{}"), subkey: bytes = packed("QmPeer"), lasts: float = 30.0, key: bytes = b"key"
) -> DHTRecord:
    return DHTRecord(key, subkey, value, time.time() + lasts)


def test_records_of_members_are_within_them() -> None:
    longest = max(records.LIFETIME, records.RUNS_LIFETIME)
    signed = packed("x" * records.RECORD_BYTES) + b"[signature:" + b"A" * 344 + b"]"
    subkey = packed("Qm" + "x" * 44 + "[owner:ssh-rsa " + "A" * 372 + "]")
    assert within_limits(record(signed, subkey, longest), LIMITS)
    assert within_limits(record(packed("x" * 4900), PLAIN, 1000.0, b"list"), LIMITS)


@pytest.mark.parametrize(
    "bad",
    [
        record(packed("x" * RECORD.size)),
        record(subkey=packed("x" * SUBKEY_BYTES)),
        record(lasts=RECORD.lifetime + CLOCKS + 600),
        record(lasts=1e11),
        record(lasts=math.nan),
        record(lasts=math.inf),
        record(subkey=PLAIN),
        record(packed("x" * 5000), PLAIN, key=b"list"),
        record(packed("x"), PLAIN, 1600.0, b"list"),
        record(subkey=b""),
        record(subkey=packed(7)),
        record(subkey=packed("a") + packed("b")),
        record(subkey=b"\xd9\x06QmPeer"),  # whose length takes a byte more than needed: it is packed anew by a reader
        record(subkey=nested(300)),
        record(packed(["x"])),
        record(packed({"x": 1})),
        record(packed(b"x")),
        record(nested(1)),
        record(nested(300)),
        record(b""),
        record(b"\xc1"),
        record(packed("x") + b"more"),
        record(packed("x") + b"[signature:"),
        record(packed("x") + b"[signature:AAAA]\x01"),  # stripped of its signature, it is more than a text
        record(packed("x") + b"[signature:AAAA]", PLAIN, 1000.0, b"list"),  # which nobody signs
        record(packed("xyz")[:-1]),
        record(b"\xa2\xff\xff"),
    ],
)
def test_all_else_is_refused(bad: DHTRecord) -> None:
    assert within_limits(bad, LIMITS) is False


def read(data: bytes, mend: str) -> subprocess.CompletedProcess[bytes]:
    """By hivemind in a child process, which may crash."""
    program = [sys.executable, "-c", CHILD.format(mend=mend)]
    return subprocess.run(program, input=data, capture_output=True, timeout=120, check=False)


def test_a_kilobyte_of_nesting_ends_hivemind_and_not_us() -> None:
    assert dht  # its import mends hivemind
    data = nested(300)
    assert len(data) < 1200
    with pytest.raises(ValueError, match="at level 4 of nesting"):
        MSGPackSerializer.loads(data)
    mended = read(data, "import peer.p2p.dht")
    assert mended.returncode == 1 and b"of nesting" in mended.stderr
    assert read(data, "").returncode == -signal.SIGSEGV, "hivemind is mended: shorten dht/mended.py"


def test_what_the_dht_itself_sends_is_read() -> None:
    held = DictionaryDHTValue()
    held.store("a", b"value", 1e10)
    held.store(("b", ("c", 1)), b"value", 2e10)
    found = MSGPackSerializer.loads(MSGPackSerializer.dumps(held))
    assert dict(found.items()) == dict(held.items())
    assert MSGPackSerializer.loads(nested(LEVELS)) is not None
    with pytest.raises(ValueError, match="extension type 7"):
        MSGPackSerializer.loads(nested(1, code=7))
    assert MSGPackSerializer.loads(nested(LEVELS)) is not None  # a failure leaves no level behind
