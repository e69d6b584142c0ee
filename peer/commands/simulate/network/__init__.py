"""``noloco-peer simulate --network``: thousands of peers by a model of time alone. Nothing is trained.

It says who waits how long on which network. Reading order: command.py, conditions.py, methods.py.
"""
