"""Other people's training loops in a swarm: :class:`peer.OuterLoop` in loop.py. It uses ``training``, and no commands.

Reading order: loop.py, account.py, state.py, weights.py, config.py, huggingface.py; whole programs in examples/.
"""
