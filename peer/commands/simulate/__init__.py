"""``noloco-peer simulate``: many replicas in one process, on a simulated clock.

The inner loop, the outer methods and the codecs are the peer's own. It knows no network (a contract in
pyproject.toml).

Reading order: command.py and options.py (what it is told), simulation.py, world.py (the clock), replica.py,
meetings.py (who meets whom), swap.py and averaging.py (pairs and groups), together.py, sampling.py and draw.py
(figures). network/ is a model of time alone.
"""
