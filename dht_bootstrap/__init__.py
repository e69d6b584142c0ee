"""The bootstrap node: a fixed address by which peers find the swarm. It trains nothing and may die any time."""
