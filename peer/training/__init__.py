"""A peer of the swarm that trains: its loop, its state, its checkpoints."""
