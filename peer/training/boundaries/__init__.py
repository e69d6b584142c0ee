"""What happens at a boundary: match, exchange, apply; by the whole tensor while training waits, or in parts beside it.

Reading order: boundary.py, blocking.py, group_weights.py, overlapped.py, rollback.py.
"""
