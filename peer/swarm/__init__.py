"""Finds the members that average with this peer: the directory, pairs and groups, joining, healing.

It knows the network (p2p), the configuration and the types of a round, but not the exchange, the model or the method.
Reading order: connect.py and configuration.py, before a model is loaded; presence.py, which the training loop
holds; context.py; start_together.py; matchmaking.py, then pairing/ or grouping/; state_transfer/; then directory/ and
healing.py.
"""
