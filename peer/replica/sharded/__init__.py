"""A peer of several ranks: torchrun starts one process a GPU. Rank 0 is the peer and commands the other ranks.

Only rank 0 knows the swarm, the data and the files. Each other rank knows its shard of the weights.

Reading order: launch.py (the rank of this process), channel.py (the line between two ranks, and their shared memory),
commands.py, ranks.py (rank 0), worker.py (the other ranks), then the replica: replica.py, weights.py, inner_loop.py,
muon.py.
"""
