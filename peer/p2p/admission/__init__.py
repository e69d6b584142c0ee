"""Invited swarms: certificates that the owner signs, and the checks of them.

Reading order: invitation.py (certificates, pure), gate.py (streams), dht_rules.py (the DHT, with the owner's
list of revocations).
"""
