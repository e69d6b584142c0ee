"""Peers that began apart (late_join.py) or came apart (divergence.py) become one swarm. Rules only: no network."""
