"""Data of any size, read piece by piece: a source has shards, a shard has rows, a row is a document.

A source knows its files and no tokenizer. A split knows both.

Reading order: source.py (the interface), opening.py (from the configuration to a source), text.py, jsonl.py,
parquet.py, huggingface.py (the sources), documents.py (a split: the order of the rows), stream.py (from documents to
batches).
"""
