"""``noloco-peer swarm``: a whole swarm on one machine, each member a process of its own."""
