"""Hosts in network namespaces on this machine, joined by links with a rate, a delay and a loss."""
