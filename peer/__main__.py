"""``noloco-peer``, also as ``python -m peer``."""

from __future__ import annotations

import signal
from importlib import import_module


def main() -> None:
    """Of the installed command."""
    run("peer.commands.cli")


def run(module: str) -> None:
    """Load a command and run it. Ctrl+C while it loads ends the process at once, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until begin_command
    import_module(module).main()


if __name__ == "__main__":
    main()
