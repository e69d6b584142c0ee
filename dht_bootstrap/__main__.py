"""``python -m dht_bootstrap`` is ``noloco-bootstrap``."""

from dht_bootstrap.cli import main

if __name__ == "__main__":
    main()
