"""``noloco-peer swarm``: a whole swarm on one machine, each member a separate process.

It starts its members by command lines and reads the files that they write; it takes no part in the swarm.

Reading order: swarm.py, tail.py (the files that they write), table.py (the live view), summary.py (summary.json).
"""
