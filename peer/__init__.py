"""The training peer. Reading order: trainer.py, inner.py, outer/noloco.py, exchange/pair.py, swarm/rendezvous.py."""

__version__ = "0.1.0"
