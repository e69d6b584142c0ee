"""One line an event: time, level, peer name, sentence, key=value fields."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

LOGGER = "noloco"


def get_logger(part: str) -> logging.Logger:
    """Logger of one part of the program, for example ``noloco.rendezvous``."""
    return logging.getLogger(f"{LOGGER}.{part}")


def fields(**values: object) -> str:
    """``key=value`` pairs in the order given; floats shortened, ``None`` left out."""
    return " ".join(f"{key}={_short(value)}" for key, value in values.items() if value is not None)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def setup(peer: str, logfile: Path | None = None) -> None:
    """Log to stderr and, when given, to ``logfile``; every line names the peer."""
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)s peer={peer} %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if logfile is not None:
        logfile.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(logfile, encoding="utf-8"))
    root = logging.getLogger(LOGGER)
    root.handlers.clear()
    root.propagate = False
    root.setLevel(os.environ.get("NOLOCO_LOG_LEVEL", "INFO").upper())
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)


def quiet_libraries() -> None:
    """hivemind and transformers speak at length about peers that leave; we report those ourselves."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
