"""The average of a group of everyone. Promise: all members have the same result, by its digest, or nobody uses it.

Read protocol.py (a round from streams to verdict) and wire.py (its messages), streams.py and flow_control.py (how the
members reach each other), then the two ways to average: all_reduce.py, and all_gather.py with sparse.py. It is told who
the members are; who they are, swarm/grouping decides.
"""
