"""All live peers form one group. Reading order: matchmaking.py, known_members.py, leadership.py, leader.py, member.py,
messages.py.

This package compares lineages, so that a group has one. It does not know what the group averages.
"""
