"""A newcomer takes the state of a member: join.py chooses donors, download.py fetches parts, donor.py gives them.

It moves flat vectors that are verified part by part, and does not know what they mean.
"""
