"""`make gpu-test`: is all of this right, and fast, on this machine's accelerator?

python -m tests.gpu [--only CHECK ...] [--wheels FOLDER] [--json FILE] [--commit HASH] [--limit SECONDS]

Exit code 0: nothing is wrong, or there is no accelerator; 1: something is wrong; 2: something is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.gpu import wheels

RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "gpu.json"
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # CUDA, ROCm, WSL


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="what only an accelerator shows")
    parser.add_argument(
        "--only", nargs="+", metavar="CHECK", help="names of files in tests/gpu/checks; writes figures to --json only"
    )
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels of what this machine lacks")
    parser.add_argument("--json", type=Path, metavar="FILE", default=None, help=f"figures (default {RESULT.name})")
    parser.add_argument("--commit", metavar="HASH", default="", help="of this tree, where there is no git")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="no finding begins after them (default 840)")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: for checks to the bit
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(prefix="gpu-test-") as folder:
        try:
            added = wheels.install(args.wheels, Path(folder, "site")) if args.wheels else []
        except OSError as error:
            return _say(f"gpu-test: {error}", 2)
        if added:
            print(f"from wheels: {', '.join(added)}", flush=True)
        return _with_torch(args, Path(folder))


def _with_torch(args: argparse.Namespace, folder: Path) -> int:
    missing = wheels.missing()
    if "torch" in missing and not any(Path(it).exists() for it in DEVICE_FILES):
        return _say("gpu-test: skipped, there is no accelerator here and no torch", 0)
    if not missing:
        import torch

        if not torch.cuda.is_available():
            return _say(f"gpu-test: skipped, torch {torch.__version__} finds no accelerator here", 0)
    if missing:
        return _say(f"gpu-test: {', '.join(missing)} missing; make gpu-test WHEELS=folder installs wheels", 2)
    from tests.gpu import run

    json_file = args.json or (None if args.only else RESULT)
    return run.on_accelerator(folder, args.only, json_file, args.commit, args.limit or run.LIMIT)


def _say(line: str, code: int) -> int:
    print(line)
    return code


if __name__ == "__main__":
    sys.exit(main())
