"""``noloco-bootstrap``, also as ``python -m dht_bootstrap``."""

from __future__ import annotations

from peer.__main__ import run


def main() -> None:
    """Of the installed command."""
    run("dht_bootstrap.cli")


if __name__ == "__main__":
    main()
