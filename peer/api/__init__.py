"""Your own training loop in a swarm: loop.py has :class:`peer.OuterLoop`."""
