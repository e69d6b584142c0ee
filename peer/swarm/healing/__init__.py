"""Peers that began apart, or came apart, become one swarm."""
