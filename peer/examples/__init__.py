"""Programs with loops of their own, each a member of a swarm: ``python -m peer.examples.bare_loop``."""
