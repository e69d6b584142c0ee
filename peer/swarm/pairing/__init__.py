"""Two peers agree to meet at their next boundaries: rendezvous.py, proposals.py, agreement.py, messages.py.

The rule by which they choose each other is peer/rounds/pairing_rule.py; what they swap is of no concern here.
"""
