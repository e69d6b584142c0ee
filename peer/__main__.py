"""``python -m peer`` is ``noloco-peer``."""

from peer.commands.cli import main

if __name__ == "__main__":
    main()
