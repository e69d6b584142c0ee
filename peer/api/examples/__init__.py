"""Programs with their own training loops as members of a swarm: ``python -m peer.api.examples.bare_loop``."""
