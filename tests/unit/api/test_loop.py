"""The loop itself, without a network."""

from __future__ import annotations

from unittest.mock import Mock

from peer.api.loop import OuterLoop


def test_another_state_is_taken_after_the_running_swap_was_given_up() -> None:
    """Parts and corrections of a swap that went on would change the weights that the program has restored."""
    outer, watched = object.__new__(OuterLoop), Mock()
    for name in ("_state", "_boundary", "_training", "_account", "_member", "_length", "_phase"):
        setattr(outer, name, getattr(watched, name))
    outer.load_state_dict({})
    called = [call[0] for call in watched.mock_calls]
    assert called.index("_boundary.abandon") < called.index("_state.load_state_dict")
    assert called[-1] == "_boundary.between_steps"
