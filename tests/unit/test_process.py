"""What ends a process, and in which order."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from peer import process

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, signal
from peer.process import Signals, Stop

signal.signal(signal.SIGHUP, signal.{before})
signals = Signals(Stop())
signals.begin_loop()
for _ in range(2):
    os.kill(os.getpid(), signal.SIGHUP)
print(signals.stop.requested)
"""


@pytest.mark.parametrize(("before", "asked"), [("SIG_DFL", "True"), ("SIG_IGN", "False")])
def test_a_terminal_that_is_lost_asks_the_loop_to_stop_but_not_under_nohup(before: str, asked: str) -> None:
    """It ended the peer at once, and its last steps were lost. bash may send the signal twice."""
    program = [sys.executable, "-c", PROGRAM.format(before=before)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{asked}\n")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="keeps freed memory as it likes")
def test_parts_of_a_swap_take_the_memory_of_earlier_ones() -> None:
    """Each took 510 pages that the system had to zero: 60% of the processor time of its outer step."""
    program = [sys.executable, "-m", "tests.unit.page_faults"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 50


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
    ids=["no cgroup", "no quota", "one and a half", "a hundredth", "more than there are", "v1, no quota", "v1"],
)
def test_a_container_has_the_cores_of_its_quota(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With docker's ``--cpus`` all of the machine's were counted, and as many threads stood still most of the time."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(process, "CONTAINER", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert process.cores() == expected


IMPORTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhole = True\n"
IMPORTING = """
import time
from peer.process import Signals, Stop, begin_command

{begin}
try:
    import imported
    time.sleep(60)
except KeyboardInterrupt:
    print(imported.whole)
"""


@pytest.mark.parametrize("begin", ["begin_command()", "Signals(Stop())"])
def test_a_signal_within_an_import_is_raised_after_it(tmp_path: Path, begin: str) -> None:
    """numpy was half there: an error of its own 900 lines long, or none at all and another exit code."""
    (tmp_path / "imported.py").write_text(IMPORTED)
    (tmp_path / "program.py").write_text(IMPORTING.format(begin=begin))
    program = [sys.executable, str(tmp_path / "program.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


LOADING = """
import os, signal, sys
from peer.__main__ import run

class Finder:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
run({module!r})
"""


INVITING = """
import os, signal, sys, tempfile
from dht_bootstrap.__main__ import main
from peer.p2p.admission import invitation

honest = invitation.load_or_create
def interrupted(key):
    made = honest(key)
    os.kill(os.getpid(), signal.SIGINT)
    return made

invitation.load_or_create = interrupted
sys.argv = ["noloco-bootstrap", "invite", "a", "--owner", "owner.key"]
main()
"""


def test_ctrl_c_leaves_no_key_of_an_invitation_behind(tmp_path: Path) -> None:
    program, environment = [sys.executable, "-c", INVITING], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [it.name for it in tmp_path.iterdir() if "invit" in it.name] == []


@pytest.mark.parametrize("module", ["peer.commands.cli", "dht_bootstrap.cli"])
def test_ctrl_c_while_a_command_loads_is_no_traceback(module: str) -> None:
    """It was Python's, in the first half second."""
    program = [sys.executable, "-c", LOADING.format(module=module), "--version"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
