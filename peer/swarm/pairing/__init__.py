"""Two peers agree on a meeting. Reading order: matchmaking.py, proposals.py, candidate_order.py, agreement.py.

peer/rounds/pairing_rule.py has the rule by which they choose each other. This package does not know what they swap.
"""
