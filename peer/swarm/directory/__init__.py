"""The directory of members in the DHT: records.py, buckets.py, reader.py, directory.py; observer.py for onlookers.

It knows the DHT and nothing of what members do with one another; duplicate_identity.py looks for copied keys in it.
"""
