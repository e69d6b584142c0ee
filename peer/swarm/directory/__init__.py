"""The directory of members in the DHT. Reading order: records.py, buckets.py, reader.py, directory.py.

It knows the DHT, not what members do with one another. duplicate_identity.py looks for copied keys in it.
likely_runs.py chooses among many runs. ended.py has the last figures of runs that are not in it any more, from a
bootstrap node.
"""
