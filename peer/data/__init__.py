"""From texts to batches of token ids.

It knows files, the configuration and the Hugging Face libraries. It knows no model and no network of peers.

Reading order: open.py (from the configuration to batches), tokenizer.py, corpus.py (splits and validation sets),
batches.py (batches as a function of seed, stream and position), sources/ (data that does not fit into memory),
prefetch.py (reading ahead).
"""
