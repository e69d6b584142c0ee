"""What must be equal in a swarm, and how a difference is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.config.data import TextData
from peer.config.digest import LARGEST_TEXT, canonical, digest, first_difference
from peer.config.load import load
from peer.config.methods import NoLoCoConfig
from peer.config.schema import InnerConfig, RunConfig


def test_places_are_not_part_of_the_digest() -> None:
    assert digest(RunConfig(dir=Path("/a"))) == digest(RunConfig(dir=Path("/b")))
    assert digest(RunConfig(data=TextData(name="text", train=("a",)))) == digest(
        RunConfig(data=TextData(name="text", train=("b",)))
    )


def test_everything_else_is() -> None:
    assert (
        len({digest(RunConfig()), digest(RunConfig(seed=1)), digest(RunConfig(inner=InnerConfig(learning_rate=1e-4)))})
        == 3
    )


def test_the_first_differing_key_is_named_with_both_values() -> None:
    mine, theirs = canonical(RunConfig()), canonical(RunConfig(inner=InnerConfig(learning_rate=0.002)))
    assert first_difference(mine, theirs) == "run.inner.learning_rate is 0.001 here and 0.002 there"
    assert "not set" in first_difference(mine, '{"name": "demo"}')
    other = canonical(load([Path("configs/demo-diloco.yaml")]).run)  # its overlap follows from the method
    assert first_difference(canonical(load([Path("configs/demo.yaml")]).run), other).startswith("run.outer.name is ")
    assert "another version" in first_difference(mine, mine)


@given(st.text() | st.just("[" * 10000) | st.just("3"))
def test_a_stranger_may_send_anything(theirs: str) -> None:
    assert first_difference(canonical(RunConfig()), theirs)


def test_a_long_text_is_not_even_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """62 kB of a refusal, a long key of many others, took 97 MB on the network thread."""
    mine = canonical(RunConfig())
    long = json.dumps({"a" * LARGEST_TEXT: {str(number): 1 for number in range(3200)}})
    monkeypatch.setattr(json, "loads", None)
    assert first_difference(mine, long) == "the swarm's configuration could not be read"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=200), JSON, max_size=3))
def test_what_a_stranger_adds_to_this_run_stays_one_short_line(added: dict[str, object]) -> None:
    mine = canonical(RunConfig())
    said = first_difference(mine, json.dumps({**json.loads(mine), **added}))
    assert len(said.splitlines()) == 1  # it goes into a log, where a second line could pretend to be an event
    assert len(said) < 300


def test_every_key_but_the_places_is_shown_to_the_others() -> None:
    assert json.loads(canonical(RunConfig())).keys() == RunConfig.model_fields.keys() - {"dir"}
    text = json.loads(canonical(RunConfig(data=TextData(name="text", train=("secret/*.txt",), validation=("held/*",)))))
    tokenizer = {"name": "bytes", "vocabulary": 257, "end": None}
    assert text["data"] == {"name": "text", "sequence_length": 128, "tokenizer": tokenizer}


def test_how_a_number_is_written_does_not_matter() -> None:
    assert digest(RunConfig(inner=InnerConfig(weight_decay=1))) == digest(
        RunConfig(inner=InnerConfig(weight_decay=1.0))
    )
    assert digest(RunConfig(outer=NoLoCoConfig(beta=1))) == digest(RunConfig(outer=NoLoCoConfig(beta=1.0)))
