"""Invited swarms: certificates that the owner signs, and the checks of them.

Reading order: invitation.py (certificates, pure), gate.py (streams), dht_rules.py with subkeys.py (the DHT),
revocations.py (the owner's list).
"""
