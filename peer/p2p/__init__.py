"""The peer-to-peer network: nodes, streams and the DHT. The only package that imports hivemind.

It knows addresses, identities, bytes and deadlines. It knows no swarm, no model and no outer method.

Reading order: stream.py (messages and bytes with deadlines), greeting.py (the first message), payload.py (tensors on a
stream), bandwidth.py (how fast they may go), speed.py (how fast they can), deadline.py (how long transfers may
take), budgets.py (how much a node does for others), event_loop.py (the thread that runs all of it), daemon.py (p2pd as
a child process), identity.py and addresses.py (who and where a node is), dial.py and dht/ (reach other nodes), bulk/
(direct connections for parts), settings.py and node.py (all of them together). reachability/ serves peers that cannot
be dialled, admission/ serves invited swarms; protobuf.py reads and writes the messages of libp2p itself.
"""
