"""Programs with loops of their own, each a member of a swarm: ``python -m peer.api.examples.bare_loop``."""
