"""``noloco-peer export``: from the checkpoints of one or several peers to a folder that transformers loads.

It knows checkpoints and models, and no network.

Reading order: command.py (options), work.py (the steps), sources.py (which checkpoints), mixing.py (their average),
card.py and tokenizer.py (what is written beside the weights), folder.py (the folder, whole or not at all).
"""
