"""The swarm in virtual time: many peers in one process and one thread, on a network and a clock that a seed decides.

The peers run the product's own protocol code, from the trainer down to the streams' bytes. Replaced are only what is
below it: the clock and the threads (``runtime.py``), the p2p daemon and hivemind's DHT (``p2p/``),
and the inner loop, which is a model of time with a little real arithmetic (``training.py``).

Reading order: runtime.py, p2p/, training.py, peer.py, scenario.py, world.py, checks.
"""
