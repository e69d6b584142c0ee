"""Peers that others cannot dial: find out, and be reached through relays.

Reading order: dialback.py (other nodes try to dial this one, with tls_probe.py), decide.py (what follows from their
answers), relay.py (the relay's side, with circuit_messages.py), reservations.py (the side of the peer behind NAT),
own_addresses.py (what a node says of itself, while it runs), cloud.py (what a cloud that maps ports says of them).
"""
