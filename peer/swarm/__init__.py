"""Who is there, and who averages with this peer: the directory, pairs and groups, joining, healing.

It knows the network (p2p), the configuration and the words of a round; not the exchange, the model or the method.
Reading order: presence.py, which the training loop holds; matching.py; pairing/ or grouping/; then directory/,
state_transfer/ and healing/. context.py is what these share.
"""
