"""``noloco-peer check``: can this machine join a swarm, and can the others reach it? One file a topic."""
