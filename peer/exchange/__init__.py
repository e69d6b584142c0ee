"""Averages of tensors between peers: pair/ swaps with one partner, group/ averages with everyone.

Knows bytes, digests, deadlines and the arithmetic of a mean; knows no outer method, no directory and no training. It is
given open streams, or the addresses of a group's members. Imports rounds, config and p2p.

Read average.py (the interface, and means), then codec.py and modulo.py (how elements become bytes), guard.py (what is
refused of a partner), pair/ and group/. Both use the part format in p2p/payload.py, deadline.py and tasks.py.
"""
