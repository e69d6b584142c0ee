"""The average of a group of everyone. Promise: all members have the same result, by its digest, or nobody uses it.

Reading order: wire.py (the messages), protocol.py (a round from streams to verdict) with deadlines.py and verdict.py,
streams.py and flow_control.py (the streams between members), all_reduce.py (dense contributions) with rounding.py,
feedback.py, sketch.py and shown.py, all_gather.py (sparse ones). swarm/grouping chooses the members.
"""
