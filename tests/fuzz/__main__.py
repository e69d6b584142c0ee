"""``python -m tests.fuzz [--inputs 100000] [TARGET ...]``: coverage-guided inputs from atheris.

``pip install atheris==3.0.0``. Each target runs in a separate process; an input that breaks it is saved as ``crash-*``.
The peak memory and the time of each input must stay below the limits of targets.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

NAMES = (
    *("message", "relayed", "whereabouts", "payload", "record", "monitor", "certificate", "request", "extensions"),
    *("answer", "invitation", "joined", "config"),
)
LIMIT = 1800.0  # seconds for a target


def fuzz(name: str, inputs: int) -> None:
    """Run in this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["peer", "dht_bootstrap"]):
        from tests.fuzz.targets import BYTES, SECONDS, targets
    target = targets()[name]

    def one(data: bytes) -> None:
        tracemalloc.start()
        try:
            target.read(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < BYTES, f"{len(data)} bytes of input allocated {peak} bytes"

    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        for index, example in enumerate(target.examples):
            (Path(folder) / str(index)).write_bytes(example)
        flags = [f"-runs={inputs}", f"-timeout={int(SECONDS) + 1}", "-max_len=4096", "-rss_limit_mb=2048", "-seed=1"]
        atheris.Setup([sys.argv[0], *flags, "-verbosity=0", "-close_fd_mask=0", folder], one)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description="arbitrary bytes for every parser of untrusted input")
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="inputs per target (default 100,000)")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", choices=[[], *NAMES], metavar="TARGET", help=", ".join(NAMES))
    args = parser.parse_args()
    if args.in_process:
        fuzz(args.targets[0], args.inputs)
        return
    broken = []
    for name in args.targets or NAMES:
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz", "--in-process", "--inputs", str(args.inputs), name]
        words = "no crash, no hang, nothing above its limit"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
            if done.returncode:
                words = f"broken\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
        except subprocess.TimeoutExpired:
            words = f"not done after {LIMIT:.0f} s: give fewer --inputs, or an idle machine"
        broken += [name] * (not words.startswith("no "))
        print(f"{name}: {args.inputs:,} inputs in {time.monotonic() - began:.0f} s: {words}", flush=True)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
