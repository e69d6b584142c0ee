"""A peer of the swarm that trains: its loop, its boundaries, its state, its checkpoints. It may use every package but
``api`` and ``commands``.

Reading order: trainer.py, boundaries/, outer_state.py, state.py, catch_up.py, validation.py, checkpoint.py, saving.py,
pausing/; put together in replica.py, run_folder.py, resources.py, member.py and assemble.py.
"""
