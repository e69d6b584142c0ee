"""``noloco-peer check``: can this machine join a swarm, and can the others reach it?

It reads the configuration, the network and the directory; it trains nothing and announces nothing.

Reading order: finding.py (one line and its advice), runner.py (all topics in their order), then the topics: local.py,
network.py with reach.py and members.py, speed.py with swap_time.py, training.py.
"""
