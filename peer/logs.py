"""Logging: one line for each event, with time, level, peer name, sentence and key=value fields.

Whatever a message quotes, it is escaped here, once for all handlers: nobody else can write a line or move the cursor.
"""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

LOGGER = "noloco"
TAKES_SECONDS = 1.0  # for a terminal or pipe to take a line before lines are lost
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_logger(part: str) -> logging.Logger:
    """Logger of one part of the program, for example ``noloco.pairing``."""
    logger = logging.getLogger(f"{LOGGER}.{part}")
    logger.addFilter(_escape)
    return logger


def printable(text: str) -> str:
    """One line: line breaks, control characters and those that change the direction of text are escaped."""
    return text if text.isprintable() else "".join(it if it.isprintable() else repr(it)[1:-1] for it in text)


def _escape(record: logging.LogRecord) -> bool:
    """Also for the handlers of a program with its own loop. A wrong call stays for the handler, which reports it."""
    with suppress(TypeError, ValueError):
        record.msg, record.args = printable(record.getMessage()), None
    return True


def fields(**values: object) -> str:
    """``key=value`` pairs in the order given; floats shortened, ``None`` left out."""
    short = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in values.items()}
    return " ".join(f"{key}={value}" for key, value in short.items() if value is not None)


def setup(peer: str, logfile: Path | None = None) -> None:
    """Log to stderr and, when given, to ``logfile``; every line names the peer."""
    root = logging.getLogger(LOGGER)
    root.handlers.clear()
    root.propagate = False
    _log_to(root, peer, [StderrLog(sys.stderr), *_file(logfile)])


@contextmanager
def attached(peer: str, logfile: Path) -> Iterator[None]:
    """As :func:`setup`, inside another program: to stderr only if that program has no logging. Restored at the end.

    A program may have several peers: what is said :func:`on_behalf_of` another one is left out.
    """
    root = logging.getLogger(LOGGER)
    has_logging = not all(isinstance(it, StderrLog | PeerLog) for it in (*root.handlers, *logging.getLogger().handlers))
    ours = [*([] if has_logging else [StderrLog(sys.stderr)]), *_file(logfile)]
    for handler in ours:
        handler.addFilter(lambda _: _acting.get() in (None, logfile))
    level = root.level
    _log_to(root, peer, ours)
    _levels.append(level)
    on_behalf_of(logfile)
    try:
        yield
    finally:
        root.setLevel(_levels.pop())  # the last one restores the program's, in whatever order they end
        for handler in ours:
            root.removeHandler(handler)
            handler.close()


_levels: list[int] = []  # the logger's before each peer within another program
_acting: ContextVar[Path | None] = ContextVar("the log of the peer that acts", default=None)


def on_behalf_of(logfile: Path) -> None:
    """From now on what this thread does, and what it begins on a network thread, is the peer's with ``logfile``."""
    _acting.set(logfile)


def _file(path: Path | None) -> list[logging.Handler]:
    if path is None:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    return [PeerLog(path, encoding="utf-8")]


class StderrLog(logging.StreamHandler[TextIO]):
    """Standard error. Its reader may stand still (Ctrl+S, a pager), and no thread may wait for it: a line that it does
    not take within a second is left out, and counted.
    """

    _lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not self._takes():
            self._lost += 1
            return
        lost, self._lost = self._lost, 0
        if lost:
            said = f"lines left out, as nothing read them: {lost}"
            super().emit(logging.LogRecord(record.name, logging.WARNING, "", 0, said, None, None))
        super().emit(record)

    def _takes(self) -> bool:
        try:
            return bool(select.select([], [self.stream], [], 0.0 if self._lost else TAKES_SECONDS)[1])
        except (OSError, ValueError, TypeError):  # it is no file, or closed
            return True


class PeerLog(logging.FileHandler):
    """A file on a disk that may be full. It says once on stderr that it cannot write, until it can again."""

    _failing = False

    def flush(self) -> None:
        super().flush()
        self._failing = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failing:
            self._failing = True
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{self.baseFilename}: lines are lost until it can be written: {error.strerror}\n")

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _log_to(root: logging.Logger, peer: str, handlers: list[logging.Handler]) -> None:
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03d %(levelname)s peer={peer} %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    root.setLevel(_level())
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)


def _level() -> str:
    from peer.errors import UserError  # it imports this module

    wish = os.environ.get("NOLOCO_LOG_LEVEL") or "INFO"
    if wish.upper() not in LOG_LEVELS:
        raise UserError(f"NOLOCO_LOG_LEVEL: {wish} is none of {', '.join(LOG_LEVELS)}")
    return wish.upper()


def quiet_hivemind() -> None:
    """Silence hivemind's logs about peers that leave, which we report ourselves. Call it before that import."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")


def quiet_libraries() -> None:
    """Silence hivemind and transformers, in our own programs."""
    quiet_hivemind()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
