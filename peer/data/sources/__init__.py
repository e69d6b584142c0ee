"""Data of any size, read piece by piece: shards with rows, each row a document.

A source knows its files and no tokenizer; a split knows both.

Reading order: source.py (the interface), opening.py (from the configuration to a source), text.py, jsonl.py,
parquet.py, huggingface.py (the sources), documents.py (a split: which row comes when), stream.py (from documents to
batches).
"""
