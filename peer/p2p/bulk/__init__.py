"""A channel of its own for parts: TLS connections between two members, beside the p2p stream on which they agree.

It knows bytes and parts, no method and no codec. Reading order: offer.py (two members agree on a channel), secure.py
(certificates, the handshake), listener.py (the port, and its other side), transfer.py (the connections of one
transfer), connection.py (one of them), handover.py (what the event loop and the connections' threads tell each other),
payload_parts.py (which parts to ask for), receiving.py and sending.py (what each connection's thread does), growth.py
(how many connections).
"""
