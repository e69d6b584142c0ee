"""The commands of ``noloco-peer``: a file or a package each.

They may use everything below them; only ``python -m peer`` imports them. A command imports what it needs when it runs,
so that the others start at once.

Reading order: cli.py (all options), then one command by itself: check/, local_swarm/ (``swarm``), simulate/, export/,
status.py, tokenize.py. What ``train`` does is in peer/training.
"""
