"""Hosts in network namespaces on this machine. Each link between them has a rate, a delay and a packet loss."""
