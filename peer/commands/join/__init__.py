"""``noloco-peer join ADDRESS``: train what a swarm trains, without its configuration file.

Reading order: configuration.py (the swarm's ``run`` and this machine's own settings become one configuration), kept.py
(for a restart), words.py (the lines that are shown before the training), micro_batch.py (what fits into this machine's
memory).
"""
