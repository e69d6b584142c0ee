"""``noloco-peer export``: from the checkpoints of one or several peers to a folder that transformers loads."""
