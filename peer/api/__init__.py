"""A program's own training loop as a member of a swarm: :class:`peer.OuterLoop` in loop.py.

Reading order: loop.py, account.py, state.py, weights.py, config.py, shared.py (what the swarm decides), huggingface.py;
whole programs in examples/.
"""
