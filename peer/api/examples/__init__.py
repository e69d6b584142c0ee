"""Programs with their own training loops as members of a swarm: ``python -m peer.api.examples.bare_loop``.

Reading order: bare_loop.py (the shortest), nano_gpt.py (a complete script), hf_trainer.py (a callback); common.py is
what they share.
"""
