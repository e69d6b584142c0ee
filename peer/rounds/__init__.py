"""The values and rules of a round: pure, without network, files or threads of their own.

Reading order: types.py (names, outcomes, groups), contribution.py (what goes into an average, and its mean),
state.py (what a newcomer takes), progress.py (the inner phase and its end), pairing_rule.py (who meets whom),
transfer_rule.py (how long a transfer may take), backoff.py (who is left out, and who did well).
"""
