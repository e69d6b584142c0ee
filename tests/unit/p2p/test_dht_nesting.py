"""Nested extension types in a message of the DHT: an error of one request, and not the end of the process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from peer.p2p import dht  # its import mends hivemind
from peer.p2p.dht.nesting import LEVELS
from tests.swarm.support.packets import nested

CHILD = """
import sys
{mend}
from hivemind.utils import MSGPackSerializer
try:
    MSGPackSerializer.loads(sys.stdin.buffer.read())
except ValueError as error:
    sys.exit(str(error))
"""


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
    assert read(data, "").returncode == -signal.SIGSEGV, "hivemind is mended: dht/nesting.py can go"


def test_what_the_dht_itself_sends_is_read() -> None:
    records = DictionaryDHTValue()
    records.store("a", b"value", 1e10)
    records.store(("b", ("c", 1)), b"value", 2e10)
    found = MSGPackSerializer.loads(MSGPackSerializer.dumps(records))
    assert dict(found.items()) == dict(records.items())
    assert MSGPackSerializer.loads(nested(LEVELS)) is not None
    with pytest.raises(ValueError, match="extension type 7"):
        MSGPackSerializer.loads(nested(1, code=7))
    assert MSGPackSerializer.loads(nested(LEVELS)) is not None  # a failure leaves no level behind
