"""A peer of several ranks: one process a GPU, started by torchrun. Rank 0 is the peer, the others do what it says.

Only rank 0 knows the swarm, the data and the files; each of the others knows its shard of the weights.

Reading order: launch.py (is this process a rank?), channel.py (the line between two ranks), commands.py (what rank 0
says), ranks.py (rank 0's side), worker.py (the side of the others), then the replica: replica.py, sharding.py,
shared.py (memory of all ranks), weights.py, inner_loop.py.
"""
