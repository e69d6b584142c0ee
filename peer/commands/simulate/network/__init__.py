"""``noloco-peer simulate --network``: a model of time for thousands of peers; nothing is trained.

It shows how long peers wait on a network. Reading order: conditions.py, methods.py.
"""
