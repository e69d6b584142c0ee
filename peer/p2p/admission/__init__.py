"""Who may take part in an invited swarm."""
