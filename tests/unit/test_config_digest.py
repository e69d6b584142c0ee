"""What must be equal in a swarm, and how a difference is told."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from peer.config import Inner, Run, TextData, canonical, digest, first_difference


def test_places_are_not_part_of_the_digest() -> None:
    assert digest(Run(dir=Path("/a"))) == digest(Run(dir=Path("/b")))
    assert digest(Run(data=TextData(name="text", train=("a",)))) == digest(
        Run(data=TextData(name="text", train=("b",)))
    )


def test_everything_else_is() -> None:
    assert len({digest(Run()), digest(Run(seed=1)), digest(Run(inner=Inner(learning_rate=1e-4)))}) == 3


def test_the_first_differing_key_is_named_with_both_values() -> None:
    mine, theirs = canonical(Run()), canonical(Run(inner=Inner(learning_rate=0.002)))
    assert first_difference(mine, theirs) == "run.inner.learning_rate is 0.001 here and 0.002 there"
    assert "not set" in first_difference(mine, '{"name": "demo"}')
    assert "another version" in first_difference(mine, mine)


@given(st.text() | st.just("[" * 10000) | st.just("3"))
def test_a_stranger_may_send_anything(theirs: str) -> None:
    assert first_difference(canonical(Run()), theirs)
