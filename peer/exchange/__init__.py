"""Averages of tensors between peers: pair/ swaps with one partner, group/ averages with everyone.

It knows bytes, digests and deadlines. It knows no outer method, no directory and no training. It is given open
streams, or the addresses of a group's members.

Reading order: rounds/contribution.py (the interface, and means), codec.py and modulo.py (elements become bytes),
guard.py (what is refused), pair/, group/. Part format: p2p/payload.py; how long a swap may take: p2p/deadline.py.
"""
