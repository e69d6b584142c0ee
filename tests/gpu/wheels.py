"""What a bare machine lacks, taken from a folder of wheels. It knows the standard library only."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

# Modules without which nothing here runs. hivemind is not among them: without it the network's parts are left out.
NEEDED = (
    *("torch", "transformers", "pydantic", "numpy", "safetensors", "xxhash", "yaml", "prometheus_client"),
    "cryptography",
)


def missing() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def name_of(wheel: Path) -> str:
    """The distribution's name, as packages are compared."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def wanted(folder: Path) -> list[Path]:
    """The wheels of packages that this machine lacks. What it has stays as it is, above all its torch."""
    here = {re.sub(r"[-_.]+", "-", it.name).lower() for it in metadata.distributions() if it.name}
    return [wheel for wheel in sorted(folder.glob("*.whl")) if name_of(wheel) not in here]


def install(folder: Path, into: Path) -> list[str]:
    """Put them where this process and its children find them; the names. Raises ``OSError`` when pip refuses."""
    if not folder.is_dir():
        raise OSError(f"WHEELS: {folder} is not a folder")
    wheels = wanted(folder)
    if wheels:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(into)]
        done = subprocess.run([*pip, *map(str, wheels)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"WHEELS: {(done.stderr.strip().splitlines() or ['pip fails'])[-1]}")
    sys.path.append(str(into))
    importlib.invalidate_caches()
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{known}{os.pathsep}{into}" if known else str(into)
    return [name_of(wheel) for wheel in wheels]
