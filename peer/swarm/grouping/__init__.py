"""All live peers come together as one group: gathering.py, then roster.py, leader.py, member.py, messages.py.

It knows lineages, so that a group has one; what the group averages is of no concern here.
"""
