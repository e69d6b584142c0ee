"""hivemind's DHT among outsiders: what it may hold, who wrote it, and how much each node may ask.

Reading order: limits.py (sizes and lifetimes), authors.py (signatures), requests.py (each request and answer),
search.py, join.py. nesting.py mends hivemind when it is imported.
"""

from peer.p2p.dht.nesting import bound_nesting

bound_nesting()
