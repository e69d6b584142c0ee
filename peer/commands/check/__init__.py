"""``noloco-peer check``: can this machine join a swarm, and can the others reach it?

It knows the configuration, the network and the directory; it trains nothing and announces nothing.

Reading order: finding.py (what is checked; one line and its advice), runner.py (all topics in their order), then a
file a topic: local.py, network.py with reach.py and members.py, device.py, space.py, tokenizer.py.
"""
