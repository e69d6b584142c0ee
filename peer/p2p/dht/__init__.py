"""hivemind's DHT among outsiders: what it may hold, who wrote it, and how much each node may ask.

Reading order: limits.py (sizes and lifetimes), authors.py (signatures), requests.py (each request and answer),
search.py, join.py, anchors.py, whereabouts.py (where a peer is: the daemons ask it). mended.py is what hivemind
gets wrong, and is used when this is imported.
"""

from peer.p2p.dht.mended import bound_nesting

bound_nesting()
