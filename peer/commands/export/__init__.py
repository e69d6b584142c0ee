"""``noloco-peer export``: from the checkpoints of one or several peers to a folder that transformers loads.

It knows checkpoints and models, and no network.

Reading order: work.py (the steps), sources.py (which checkpoints, and their average), folder.py (what is written).
"""
