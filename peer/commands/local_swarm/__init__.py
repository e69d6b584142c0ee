"""``noloco-peer swarm``: a whole swarm on one machine, each member a process of its own.

It knows its members by their command lines and by the files that they write; it takes no part in the swarm.

Reading order: swarm.py, processes.py (the members), tail.py (what they have written), table.py (the live view),
summary.py (summary.json).
"""
