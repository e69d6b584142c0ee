"""A newcomer takes the state of a member: join.py asks donors, which donors.py chooses; download.py receives parts,
donor.py sends them.

It moves flat vectors, verifies each part, and does not know what they mean.
"""
