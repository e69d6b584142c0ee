"""Data of any size, read piece by piece. ``source.py`` has the words that the parts share."""
