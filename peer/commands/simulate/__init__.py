"""``noloco-peer simulate``: many replicas in one process, on a simulated clock.

It uses the peer's inner loop, outer methods and codecs, and no network (a contract in pyproject.toml).

Reading order: command.py and options.py (options), simulation.py, world.py (the clock), replica.py,
meetings.py (pairing), exchanges.py (pairs and groups), sampling.py (figures). network/ is a model of time.
"""
